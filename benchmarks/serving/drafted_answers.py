"""Compares answers with drafts to those without, token by token, on samples of RULER.

Both engines have the same weights and the same policy, which attends to every token, and decode greedily. A prompt is
computed once, with dense attention, and both store it. So answers can differ only by what drafts change. Drafts of
``sparse`` are made whether they pay or not. Answers go on after the model's end token, up to the task's limit.

Rounding depends on the number of rows of a step. Where two tokens are almost equally likely, rounding decides. Such a
near tie is defined by the rounding of full attention itself: the engine without drafts computes the answer's tokens one
by one, and again all at once. ``error`` is how far the difference of two tokens' log-probabilities changes at most
between the two, over all places of the answer and the most likely tokens of each. A place is a near tie if the
log-probabilities of the two most likely tokens differ by no more than that.

A row of the file has the tokens up to which both answers are equal. If this is not the whole answer, ``gap`` is the
difference of the two tokens' log-probabilities, in nats, without drafts. Samples that the file already has are not
asked again. The exit status is 1 if an answer in the file differs at another place than a near tie:

    python -m benchmarks.serving.drafted_answers --model smollm2-135m-64k --length 16384 --samples 1 --out FILE
    python -m benchmarks.serving.drafted_answers --model smollm2-135m-64k --length 4096 --samples 4 \
        --speculative-config '{"method": "suffix"}' --out FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.serving.speculation import Always
from benchmarks.sweeps.engines import about, add_model_arguments, model_of, step
from benchmarks.sweeps.rows import DRAFTED_ANSWERS, Rows, read
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.execution.forward import prefill, run_through
from shadowkv.engine.outputs import TokenLogprobs
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.scheduling.sparse_drafts import SparseDrafts
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.eval.records.predictions import Sample
from shadowkv.eval.running.caches import prefill_all
from shadowkv.eval.suites import ruler
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.settings import add_flag

ALTERNATIVES = 8
"""Number of most likely tokens at each place whose log-probabilities are compared."""


def answer(
    engine: Engine, sequence: CachedSequence, first: int, prompt: list[int], params: SamplingParams
) -> tuple[list[int], list[TokenLogprobs]]:
    """Returns the tokens of an answer whose prompt is in ``sequence`` and whose first token is known, and the
    log-probabilities of the other tokens if ``params`` asks for them."""
    outputs = [engine.resume(engine.request("alone", prompt, params), sequence, first)]
    while engine.has_work:
        outputs += step(engine)
    tokens = [token for output in outputs for token in output.token_ids]
    return tokens, [place for output in outputs for place in output.logprobs or ()]


@torch.inference_mode()
def computed_at_once(engine: Engine, sequence: CachedSequence, tokens: list[int]) -> Tensor:
    """Returns the log-probabilities [n, V] of what follows each of n tokens, computed together. ``sequence`` has the
    prompt."""
    _, (states,) = run_through(prefill(engine.runner.model, engine.cache, [(sequence, tokens)], scored=True))
    return engine.runner.model.logits(states).log_softmax(-1)


def gaps(place: TokenLogprobs, again: Tensor) -> tuple[float, float]:
    """Returns the difference of the log-probabilities of the two most likely tokens, and how far such differences to
    the most likely token change at most in ``again`` [V], another computation of the place."""
    ids = torch.tensor(list(place.top), device=again.device)
    ones = torch.tensor(list(place.top.values()), dtype=again.dtype, device=again.device)
    others = again[ids]
    best, second = ones.topk(2).indices.tolist()
    change = (ones[best] - ones) - (others[best] - others)
    return float(ones[best] - ones[second]), float(change.abs().max())


def compare(plain: Engine, drafting: Engine, sample: Sample) -> dict[str, Any]:
    """Asks both engines a sample. Returns the figures of a row."""
    prompt = plain.tokenizer.encode(sample.turns[0], add_special_tokens=True)
    params = SamplingParams(max_tokens=sample.max_new_tokens, temperature=0.0, ignore_eos=True, cache_prompt=False)
    capacity = plain.request("alone", prompt, params).capacity
    caches = [plain.cache, plain.cache, drafting.cache]
    (alone, together, drafted), logits = prefill_all(plain.runner.model, caches, prompt, capacity)
    first = int(logits[0].argmax())
    wanted, places = answer(plain, alone, first, prompt, replace(params, logprobs=ALTERNATIVES))
    again = computed_at_once(plain, together, wanted[:-1])
    plain.cache.release(together)
    differences, errors = zip(*map(gaps, places, again), strict=True)
    speculation = drafting.decode_steps.speculation
    assert speculation is not None, "this engine drafts"
    stats, before = speculation.stats, replace(speculation.stats)
    found, _ = answer(drafting, drafted, first, prompt, params)
    equal = next((n for n, pair in enumerate(zip(wanted, found, strict=True)) if pair[0] != pair[1]), len(wanted))
    gap = None
    if equal < len(wanted):
        top = places[equal - 1].top  # the first token has no log-probabilities, and is equal
        gap = top[wanted[equal]] - top.get(found[equal], min(top.values()))  # at least, if it is not among them
    error = max(errors)
    return {
        "prompt_tokens": len(prompt),
        "tokens": len(wanted),
        "equal": equal,
        "gap": gap,
        "error": error,
        "near_ties": sum(difference <= error for difference in differences),
        "drafted": stats.num_draft_tokens - before.num_draft_tokens,
        "accepted": stats.num_accepted_tokens - before.num_accepted_tokens,
    }


def is_wrong(row: dict[str, str]) -> bool:
    """Whether an answer of a file differs at another place than a near tie."""
    return bool(row["gap"]) and float(row["gap"]) > float(row["error"])


def engines(args: argparse.Namespace) -> tuple[Engine, Engine]:
    """Opens an engine without drafts and one with drafts, which have the same weights."""
    settings: dict[str, Any] = {**model_of(args), "dtype": args.dtype, "kv": args.kv, "prefill": "dense"}
    config = EngineConfig(**settings, kv_dense_below=0, max_num_seqs=2, max_model_len=args.length)
    if config.spec().selects or config.spec().drafts:
        raise ValueError(f"--kv {args.kv}: the policy must attend to every token, without drafts, as full or fp8")
    loaded = load_from_config(config)
    plain = Engine(config, loaded)
    drafting = Engine(replace(config, speculative_config=args.speculative_config), loaded)
    if isinstance(drafting.decode_steps.speculation, SparseDrafts):
        drafting.decode_steps.speculation.account = Always()
    return plain, drafting


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    default = "(default: %(default)s)"
    parser.add_argument("--dtype", default="float32", help=default)
    parser.add_argument("--kv", default="full", help=f"policy that verifies; it attends to every token {default}")
    add_flag(parser, EngineConfig, "speculative_config", default={"method": "sparse"})
    parser.add_argument("--length", type=int, default=4096, metavar="TOKENS", help=f"of a sample {default}")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help=f"of each task {default}")
    parser.add_argument("--tasks", nargs="+", default=list(ruler.TASKS), choices=ruler.TASKS, metavar="TASK")
    parser.add_argument("--seed", type=int, default=0, help=f"that samples are made from {default}")
    parser.add_argument("--data", type=Path, metavar="PATH", help="folder of RULER's files")
    parser.add_argument("--out", type=Path, required=True, help="CSV file")
    args = parser.parse_args(argv)
    rows = Rows(args.out, DRAFTED_ANSWERS, replayed=())
    try:
        plain, drafting = engines(args)
    except ValueError as error:
        parser.error(str(error))
    speculation = drafting.config.speculation
    assert speculation is not None, "--speculative-config has a default"
    cell = {"model": args.model, "kv": args.kv, "method": speculation.method, "k": speculation.num_speculative_tokens}
    cell |= {"dtype": str(plain.runner.model.dtype).removeprefix("torch."), "length": args.length}
    made = (args.length, args.samples, args.seed, args.data)
    samples = [ruler.samples(task, plain.tokenizer, *made) for task in args.tasks]
    for sample in chain.from_iterable(zip(*samples, strict=True)):  # the first one of every task comes first
        row = {**cell, "task": sample.task, "sample": sample.id}
        if not rows.has(row):
            rows.add({**row, **compare(plain, drafting, sample), **about(drafting)})
    wrong = list(filter(is_wrong, read(args.out)))
    for row in wrong:
        print(f"{row['task']} {row['sample']}: no near tie after {row['equal']} tokens", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
