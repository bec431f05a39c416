"""Compares next-token distributions after a prefix-cache hit with those after a freshly computed prompt.

Prompts are cut from texts: a document, and a short question, which is the text's own next tokens. An earlier request,
the leader, computes the document. Its prompt is the document followed by other text. With policies with outliers it is
the document alone, because a sequence cannot be forked within tokens that were compressed together. All answers follow
the tokens that ``full`` generates without a hit. KL is in nats per token, between these pairs:

    full fresh > fresh     cost of the policy without a hit
    full fresh > hit       cost of the policy with a hit
    fresh > hit            effect of the hit
    hit > from host        a hit on the device, and one on pages that only host memory has
    hit > from disk        a hit on the device, and one on pages that only files have, in a new engine

    python -m benchmarks.prefix_cache.hits --text FILE --kv full turbo:dense_below=0 --out results/hits.csv
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.prefix_cache.reuse import forget_device, settle
from benchmarks.sweeps.engines import about, add_model_arguments, model_of, step
from benchmarks.sweeps.rows import ABOUT, show, write
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.execution.sampler import Sampler
from shadowkv.engine.outputs import TokenLogprobs
from shadowkv.engine.request import Request
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.scheduling.quality_meter import kl_divergence
from shadowkv.eval.fidelity.prompts import read_prompts
from shadowkv.eval.reports.statistics import mean_and_error
from shadowkv.kvcache.policy.spec import PAGE

QUESTION, OTHER = 48, 192
"""Tokens of a question, and of the text after a leader's document. A question fills no page, so a second request with
it hits only the document. The text after the document is longer than the part of a sequence that stays exact."""
COLUMNS = ("kv", "pair", "leader", "cached_tokens", "prompts", "document", "steps")
FIGURES = ("mean_kl", "mean_kl_stderr", "max_kl", "top1_agreement", "largest_logit_difference")


class Led(Sampler):
    """A sampler that records the logits of a single request. If ``answer`` is not empty, the sampler chooses its
    tokens."""

    answer: list[int]
    seen: list[Tensor]

    def sample(
        self, logits: Tensor, requests: list[Request]
    ) -> tuple[list[int], list[TokenLogprobs | None], list[bool]]:
        self.seen.append(logits[0].clone())
        tokens, logprobs, finite = super().sample(logits, requests)
        return [self.answer[len(self.seen) - 1]] if self.answer else tokens, logprobs, finite


@dataclass(frozen=True)
class Case:
    """A prompt, and the prompt of the leader that computes its document."""

    prompt: list[int]
    leader: list[int]


@dataclass(frozen=True)
class Answer:
    """The logits [steps, V] of an answer (V is the size of the vocabulary), its tokens, and the number of the prompt's
    tokens that were cached."""

    logits: Tensor
    tokens: list[int]
    cached: int


def ask(engine: Engine, prompt: list[int], steps: int, answer: list[int] | None = None, cache: bool = True) -> Answer:
    """Runs a single request. If ``answer`` is given, the answer follows its tokens."""
    engine.runner.sampler = sampler = Led(engine.cache.ops)
    sampler.answer, sampler.seen = answer or [], []
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True, logprobs=0, cache_prompt=cache)
    engine.add_request("alone", prompt, params)
    tokens, cached = list[int](), 0
    while engine.has_work:
        for output in step(engine):
            tokens += output.token_ids
            cached = output.cached_tokens
    return Answer(torch.stack(sampler.seen), tokens, cached)


def opened(args: argparse.Namespace, kv: str, directory: str) -> Engine:
    """Opens an engine, and waits until it has read which files are on the disk."""
    longest = args.document + OTHER + args.steps + PAGE
    sizes = {"max_num_seqs": 2, "max_cached_seqs": 2, "max_model_len": longest}
    settings = {**model_of(args), **sizes, "dtype": args.dtype, "prefill": "dense", "kv_disk_dir": directory}
    engine = Engine(EngineConfig(kv=kv, **settings))
    while engine.scheduler.prefix_cache.opening:
        time.sleep(0.001)
    return engine


def measure(args: argparse.Namespace, kv: str, cases: list[Case], full: list[Answer]) -> list[dict[str, Any]]:
    """Returns the rows of a policy. The first policy must be ``full``; its answers without a hit are added to the list
    ``full``."""
    fresh, hits, host, disk = list[Answer](), list[Answer](), list[Answer](), list[Answer]()
    with TemporaryDirectory(prefix="hits-") as directory:
        engine = opened(args, kv, directory)
        alone = bool(engine.cache.spec.outliers)
        for number, case in enumerate(cases):
            fresh.append(
                ask(engine, case.prompt, args.steps, full[number].tokens if number < len(full) else None, cache=False)
            )
            if len(full) <= number:
                full.append(fresh[-1])
            answer = full[number].tokens
            ask(engine, case.leader[: args.document] if alone else case.leader, 1)
            if alone:  # this request continues the leader itself, including its exact tail, and does not count
                ask(engine, case.prompt, args.steps, answer)
            hits.append(ask(engine, case.prompt, args.steps, answer))
            forget_device(engine)
            host.append(ask(engine, case.prompt, args.steps, answer))
            forget_device(engine)
            print(f"{kv}: {number + 1} of {len(cases)} prompts", file=sys.stderr, flush=True)
        expect(engine.stats().prefixes["host"].hit_tokens, sum(hit.cached for hit in hits), "from host memory")
        settle(engine)
        engine.close()
        again = opened(args, kv, directory)
        for number, case in enumerate(cases):
            disk.append(ask(again, case.prompt, args.steps, full[number].tokens))
            forget_device(again)
        expect(again.stats().prefixes["disk"].hit_tokens, sum(hit.cached for hit in hits), "from the disk")
        shared = about(again) | {"kv": kv, "leader": "document" if alone else "document and other text"}
        again.close()
    shared |= {"prompts": len(cases), "document": args.document, "steps": args.steps, "cached_tokens": hits[0].cached}
    pairs = {"full fresh > fresh": (full, fresh), "full fresh > hit": (full, hits), "fresh > hit": (fresh, hits)}
    pairs |= {"hit > from host": (hits, host), "hit > from disk": (hits, disk)}
    return [shared | {"pair": name} | compare(*pair) for name, pair in pairs.items()]


def expect(tokens: int, expected: int, where: str) -> None:
    """Raises RuntimeError if the number of tokens that came from a tier is not the expected one, or is 0."""
    if tokens != expected or not tokens:
        raise RuntimeError(f"{tokens} tokens came {where}, not {expected}")


def compare(ones: list[Answer], others: list[Answer]) -> dict[str, float]:
    """Returns the figures that compare two lists of answers with the same tokens. The standard error is over
    prompts."""
    kl = [kl_divergence(one.logits, other.logits) for one, other in zip(ones, others, strict=True)]
    agrees = [one.logits.argmax(-1) == other.logits.argmax(-1) for one, other in zip(ones, others, strict=True)]
    apart = [(one.logits - other.logits).abs().max() for one, other in zip(ones, others, strict=True)]
    mean, error = mean_and_error([float(one.mean()) for one in kl])
    figures = mean, error, float(torch.cat(kl).max()), float(torch.cat(agrees).double().mean()), float(max(apart))
    return dict(zip(FIGURES, figures, strict=True))


def cut(args: argparse.Namespace, engine: Engine) -> Iterator[Case]:
    """Yields prompts, each with a leader whose document is followed by text from elsewhere."""
    pieces = read_prompts(args.text, engine.tokenizer, args.prompts, args.document + QUESTION + OTHER)
    for number, piece in enumerate(pieces):
        document, other = piece.tokens[: args.document], pieces[number - 1].tokens[-OTHER:]
        yield Case(piece.tokens[: args.document + QUESTION], document + other)


def write_rows(path: Path, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    """Replaces a CSV file."""
    write(path, [*columns, *ABOUT], ({name: show(value) for name, value in row.items()} for row in rows))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--dtype", default="auto", help="(default: %(default)s)")
    text = "policies after `full`, which is always measured (default: %(default)s)"
    parser.add_argument("--kv", nargs="+", default=["turbo:dense_below=0", "shadowkv:dense_below=0"], help=text)
    parser.add_argument("--text", nargs="+", type=Path, help="files (default: RULER's essays)")
    parser.add_argument("--prompts", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--document", type=int, default=2048, help="tokens, whole pages (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="CSV file")
    args = parser.parse_args(argv)
    if args.document % PAGE:
        parser.error(f"--document {args.document} is not a multiple of {PAGE}")
    if QUESTION + args.steps <= PAGE:  # else a repeated request could continue the former sequence
        parser.error(f"--steps {args.steps} must be more than {PAGE - QUESTION}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 1 if the logits after a hit on another tier are not bitwise identical to those after a hit
    on the device, else 0."""
    args = parse(argv)
    with TemporaryDirectory(prefix="hits-") as directory:
        engine = opened(args, "full", directory)
        cases = list(cut(args, engine))
        engine.close()
    full, rows = list[Answer](), list[dict[str, Any]]()
    for kv in ("full", *args.kv):
        rows += measure(args, kv, cases, full)
        write_rows(args.out, (*COLUMNS, *FIGURES), rows)
        for row in rows[-5:]:
            print(" ".join(f"{name}={show(row[name])}" for name in (*COLUMNS, *FIGURES)), flush=True)
    return 1 if any(row["pair"].startswith("hit >") and row["largest_logit_difference"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
