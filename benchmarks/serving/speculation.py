"""Measures decode speed with drafts relative to that without, and the drafted tokens that are accepted. Answers are
those of a real model: quoted text, edited text (with the original as ``prediction``), answers to questions about a
text, free chats, and continuations of essays or source files.

An engine with drafts and one without run in one process with the same weights. They answer in turn, ``--rounds`` times.
If the answers differ, a message is printed. Rows that the file already has are not measured again. A prompt's time is
the median over rounds of the seconds from the first token to the last, divided by the number of tokens after the first.
A row's ratio is the sum of these times without drafts, divided by the sum with drafts:

    python -m benchmarks.serving.speculation --model smollm2-135m-64k-chat --out results/speculation.csv

To measure the acceptance of the model's own drafts even if they do not pay on this machine:

    python -m benchmarks.serving.speculation --model smollm2-135m-64k --method sparse --k 6 --always \
        --kv full:dense_below=0 --tasks essays code --context 8192 --rounds 1 --out results/sparse.csv

A model with random weights cannot quote. The task ``known`` gives it its own answer as ``prediction``, with one token
in 16 replaced:

    python -m benchmarks.serving.speculation --model qwen3.5-9b --load-format dummy --dtype float32 --tasks known \
        --hf-overrides '{"num_hidden_layers": 12, "vocab_size": 32000, ...}' --context 512 --out results/hybrids.csv
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.prefix_cache.hits import write_rows
from benchmarks.sweeps.engines import about, add_model_arguments, model_of
from benchmarks.sweeps.rows import read
from shadowkv.engine.config import EngineConfig, add_policies
from shadowkv.engine.engine import Engine
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.scheduling.sparse_drafts import SparseDrafts
from shadowkv.engine.speculation.gate import Account
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.engine.warmup import warm_up
from shadowkv.eval.fidelity.prompts import read_prompts
from shadowkv.eval.prompts.texts import haystack

COLUMNS = ("model", "kv", "method", "k", "task", "context", "batch", "accepted_per_round", "tokens_per_s", "ratio")
COLUMNS += ("slowest_ratio", "fastest_ratio", "load")

CHATS = (
    "Tell me a story about a lighthouse keeper who finds a letter in a bottle.",
    "What should I look at when I buy a used bicycle?",
    "Explain to a child why the sky is blue and sunsets are red.",
    "Write a polite message to my neighbour about the noise at night.",
)
SUBJECTS = ("startups", "work", "school", "money")
"""What the task ``questions`` asks about."""
KEY = COLUMNS[:6]
TASKS = ("quote", "edit", "questions", "chat")
KNOWN = "known"
REPLACED_EVERY = 16
"""One in this many tokens of a known answer is replaced in the prediction."""
TEXTS = {"essays": 0.0, "code": 0.0, "sampled-essays": 1.0, "sampled-code": 1.0}
"""Tasks that continue a text, and their temperatures."""
WORD, OTHER = "people", "persons"
"""The word that the task ``edit`` replaces, and the word that it writes instead."""


class Always(Account):
    """An account that always drafts as many tokens as possible."""

    def length(self, drafts: Sequence[tuple[float, int]], *others: Any) -> int:
        """Returns the largest maximum of all drafts."""
        return max(most for _, most in drafts)


def requests(
    engine: Engine, task: str, context: int, tokens: int, prompts: int
) -> Iterator[tuple[list[int], SamplingParams]]:
    """Yields prompts of a task, each of about ``context`` tokens, with sampling parameters. For tasks that continue a
    text, ``prompts`` is the number of prompts."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)

    def prompt(text: str) -> list[int]:
        return engine.tokenizer.encode_chat([{"role": "user", "content": text}])

    if task in TEXTS:
        own = {"max_tokens": tokens, "temperature": TEXTS[task], "ignore_eos": True}
        kind = Path(task.removeprefix("sampled-"))
        for number, cut in enumerate(read_prompts([kind], engine.tokenizer, prompts, context)):
            yield cut.tokens, SamplingParams(**own, seed=number)
        return
    if task == KNOWN:
        draw = random.Random(0)
        known = [draw.randrange(1000) for _ in range(context)]
        predicted = answer(engine, known, params)[0]
        predicted[REPLACED_EVERY - 1 :: REPLACED_EVERY] = [0] * (len(predicted) // REPLACED_EVERY)
        yield known, replace(params, predicted_token_ids=tuple(predicted))
        return
    if task == "chat":
        for number, text in enumerate(CHATS):
            yield prompt(text), SamplingParams(max_tokens=tokens, temperature=0.7, seed=number, ignore_eos=True)
        return
    sentences = haystack(None).sentences
    text, number = "", 0
    while len(engine.tokenizer.encode(text)) < context:
        text, number = f"{text} {sentences[number % len(sentences)]}".strip(), number + 1
    if task == "questions":
        for subject in SUBJECTS:
            ask = f"What does the following text say about {subject}? Quote the sentences that you rely on."
            yield prompt(f"{ask}\n\n{text}"), replace(params, ignore_eos=False)
        return
    ask = "Repeat the following text word for word."
    if task == "edit":
        ask = f"Repeat the following text, but write {OTHER!r} wherever it has {WORD!r}."
    predicted = engine.tokenizer.encode(text, add_special_tokens=False) if task == "edit" else []
    yield prompt(f"{ask}\n\n{text}"), SamplingParams(**{**vars(params), "predicted_token_ids": tuple(predicted)})


def answer(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], float]:
    """Returns the tokens of an answer, and the seconds of each token after the first."""
    engine.add_request("alone", prompt, params)
    said, first = list[int](), 0.0
    while engine.has_work:
        said += [token for output in engine.step() for token in output.token_ids]
        if said and not first:
            first = time.perf_counter()
    return said, (time.perf_counter() - first) / max(1, len(said) - 1)


def measure(args: argparse.Namespace, plain: Engine, drafting: Engine, task: str, context: int) -> dict[str, Any]:
    """Measures a task with both engines. Returns a row."""
    kv = plain.config.policy
    drafts = drafting.decode_steps.speculation
    assert drafts is not None, "one engine drafts"
    before = drafts.stats.num_drafts, drafts.stats.num_accepted_tokens
    times: dict[Engine, list[list[float]]] = {plain: [], drafting: []}
    for prompt, params in requests(plain, task, context, args.tokens, args.prompts):
        first = {engine: answer(engine, prompt, params)[0] for engine in times}  # fills the prefix caches
        wanted = first[plain]
        for engine in times:
            times[engine].append([])
        for _ in range(args.rounds):
            for engine in times:
                said, seconds = answer(engine, prompt, params)
                times[engine][-1].append(seconds)
                if said != wanted:
                    print(f"{task} {context}: the answers differ", file=sys.stderr)
    rounds = drafts.stats.num_drafts - before[0]
    without, with_drafts = (sum(map(statistics.median, times[engine])) for engine in (plain, drafting))
    pairs = [sum(a) / sum(b) for a, b in zip(zip(*times[plain]), zip(*times[drafting]), strict=True)]
    accepted = (drafts.stats.num_accepted_tokens - before[1]) / max(1, rounds)
    given = (args.model, kv, args.method, args.k, task, context, 1, accepted, len(times[plain]) / with_drafts)
    load = Path("/proc/loadavg").read_text(encoding="ascii").split()[0]
    figures = (*given, without / with_drafts, min(pairs), max(pairs), load)
    return dict(zip(COLUMNS, figures, strict=True)) | about(drafting)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--dtype", default="auto", help="(default: %(default)s)")
    add_policies(parser, "full")
    parser.add_argument("--method", default="suffix", help="(default: %(default)s)")
    parser.add_argument("--k", type=int, default=8, help="most drafted tokens (default: %(default)s)")
    text = "draft as many tokens as fit, whether it pays or not; only for --method sparse"
    parser.add_argument("--always", action="store_true", help=text)
    text = "(default: %(default)s)"
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=(*TASKS, *TEXTS, KNOWN), help=text)
    parser.add_argument("--prompts", type=int, default=4, help="cut from essays or code (default: %(default)s)")
    parser.add_argument("--context", nargs="+", type=int, default=[2048, 4096, 8192], help="tokens of texts")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="CSV file")
    args = parser.parse_args(argv)
    if args.always and args.method != "sparse":
        parser.error(f"--always is for --method sparse, not {args.method!r}: other drafts have a gate for each request")
    rows: list[dict[str, Any]] = [*read(args.out)] if args.out.exists() else []
    there = {tuple(row[name] for name in KEY) for row in rows}
    for kv in args.kv:
        longest = max(args.context) + args.tokens + 512
        config: dict[str, Any] = {"kv": kv, "max_num_seqs": 4, "max_model_len": longest, "dtype": args.dtype}
        config |= model_of(args)
        loaded = load_from_config(EngineConfig(**config))
        speculative = {"method": args.method, "num_speculative_tokens": args.k}
        plain = Engine(EngineConfig(**config), loaded)
        drafting = Engine(EngineConfig(**config, speculative_config=speculative), loaded)
        for engine in (plain, drafting):
            warm_up(engine)
        if args.always:
            assert isinstance(drafting.decode_steps.speculation, SparseDrafts)
            drafting.decode_steps.speculation.account = Always()
        for task in args.tasks:
            for context in args.context if task != "chat" else [0]:
                if tuple(map(str, (args.model, kv, args.method, args.k, task, context))) in there:
                    continue
                rows.append(measure(args, plain, drafting, task, context))
                write_rows(args.out, COLUMNS, rows)
                print(" ".join(f"{name}={rows[-1][name]}" for name in COLUMNS), file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
