"""Speed of decode steps, of prompts, of servers and of reused prompts, all on H100s and H200s."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from benchmarks.figures.results import (
    NONE,
    line,
    matching,
    number,
    report,
    seconds,
    table,
    times,
    whole,
)

CONTEXTS = (61440, 124928, 249856, 1000000)
THROUGHPUT = "h200/throughput"
TURBO_THROUGHPUT = "h200/throughput_640"
"""``turbo``'s largest batches with today's budget; other policies and batches are in ``THROUGHPUT``."""
PREFILL = "h200/prefill/summary.csv"
SERVING = "h200/serving/summary.csv"
REUSE = "h200/reuse/summary.csv"
VLLM = "vllm 0.26.0"

Cell = tuple[float, int] | None
"""Decode tokens per second at the largest batch, and the number of sequences of this batch. None if it was not
measured."""


def one(path: str, column: str, form: str, *where: str) -> str:
    """Returns a single figure as text in Python's format ``form``. ``path`` is a file in benchmarks/results, and
    ``column`` its column or key. For a CSV file, ``where`` has values of other columns of the line, as
    ``NAME=VALUE``."""
    if path.endswith(".json"):
        return format(float(report(path)[column]), form)
    return format(number(path, column, **dict(pair.split("=", 1) for pair in where)), form)


def decode_cell(kv: str, context: int, folder: str = THROUGHPUT) -> Cell:
    """Returns the cell of a policy at a context, from a folder that ``benchmarks.sweeps.throughput`` wrote."""
    if context == CONTEXTS[-1] and folder == THROUGHPUT:
        folder = "h200/throughput_1m"
    elif kv == "turbo" and folder == THROUGHPUT:
        folder = TURBO_THROUGHPUT
    return _largest(f"{folder}/summary.csv", kv, context)


def vllm_cell(kv: str, context: int) -> Cell:
    """Returns vLLM's cell at a context. ``kv`` is ``bf16`` or ``fp8``."""
    return _largest(f"{THROUGHPUT}/vllm.csv", kv, context)


def _largest(path: str, kv: str, context: int) -> Cell:
    lines = matching(path, kv=kv, context=context)
    if not lines:
        return None
    found = max(lines, key=lambda line: int(line["batch"]))
    return float(found["decode_tokens_per_s"]), int(found["batch"])


def _cells(cells: Iterable[Cell], full: Iterable[Cell]) -> list[str]:
    """Returns cells as text, with their speeds relative to those of ``full``."""
    texts = []
    for cell, base in zip(cells, full, strict=True):
        gain = f", {times(cell[0] / base[0])}" if cell and base and cell != base else ""
        texts.append(f"{whole(cell[0])} ({cell[1]}){gain}" if cell else NONE)
    return texts


def decode() -> str:
    """Table of every policy's decode speed on an H200."""
    full = [decode_cell("full", context) for context in CONTEXTS]
    rows = [["`full`, bfloat16 cache", *_cells(full, full)]]

    def add(label: str, cells: list[Cell]) -> None:
        rows.append([label, *_cells(cells, full)])

    add("vLLM 0.26.0, bfloat16 cache", [vllm_cell("bf16", context) for context in CONTEXTS])
    add("vLLM 0.26.0, fp8 cache", [vllm_cell("fp8", context) for context in CONTEXTS])
    for kv in ("fp8", "turboquant-4", "turboquant-4:centred=false", "turboquant-3", "shadowkv", "turbo-host", "turbo"):
        add(f"`{kv}`", [decode_cell(kv, context) for context in CONTEXTS])
    add("`turbo --quantization fp8`", [decode_cell("turbo", context, "h200/throughput_fp8") for context in CONTEXTS])
    return table(["tokens/s (sequences)", *map(whole, CONTEXTS)], rows)


def decode_h100() -> str:
    """Table of decode speeds on an H100."""
    folder, contexts = "h100/throughput", CONTEXTS[:2]
    full = [decode_cell("full", context, folder) for context in contexts]
    rows = [
        [f"`{kv}`", *_cells([decode_cell(kv, context, folder) for context in contexts], full)]
        for kv in ("full", "fp8", "turbo")
    ]
    return table(["tokens/s (sequences)", *map(whole, contexts)], rows)


def gain(kv: str, context: str, base: str = "full", folder: str = THROUGHPUT) -> str:
    """Returns the decode speed of the policy ``kv`` divided by that of the policy ``base``."""
    cell, full = decode_cell(kv, int(context), folder), decode_cell(base, int(context), folder)
    if cell is None or full is None:
        raise LookupError(f"{folder} has not both {kv} and {base} at {context}")
    return times(cell[0] / full[0])


def batch_gain(batch: str) -> str:
    """Returns the decode speed of ``turbo`` divided by that of ``full`` at 61,440 tokens, both with ``batch``
    sequences."""
    speeds = (
        number(f"{THROUGHPUT}/summary.csv", "decode_tokens_per_s", kv=kv, context=61440, batch=int(batch))
        for kv in ("turbo", "full")
    )
    return times(next(speeds) / next(speeds))


def first_token(
    kv: str, prefill: str, context: int, quantization: str = "none", engine: str = "shadowkv"
) -> float | None:
    """Returns the seconds to the first token of a prompt. None if they were not measured."""
    where = {"engine": engine, "kv": kv, "prefill": prefill, "quantization": quantization, "context": context}
    return float(line(PREFILL, **where)["ttft_s"]) if matching(PREFILL, **where) else None


def first(kv: str, prefill: str, context: str) -> str:
    """Returns the seconds to the first token with one decimal, for use in a sentence."""
    value = first_token(kv, prefill, int(context))
    if value is None:
        raise LookupError(f"{PREFILL} has no {kv} with {prefill} prefill at {context}")
    return f"{value:.1f} s"


PROMPTS = {
    "`full`, `--prefill dense`": ("full", "dense"),
    "`turbo`, `--prefill dense`": ("turbo", "dense"),
    "vLLM 0.26.0": ("bf16", "dense", "none", VLLM),
    "`turbo`, sparse": ("turbo", "auto"),
    "`turbo`, sparse, `--quantization fp8`": ("turbo", "auto", "fp8"),
}
"""For each row of the table of prompts: policy and prefill, then, if they differ from the defaults, quantization and
engine."""


def prompts() -> str:
    """Table of the seconds to the first token by length, and of the share of blocks that sparse prefills attend to."""
    rows = []
    for label, (kv, prefill, *rest) in PROMPTS.items():
        times_to_first = (first_token(kv, prefill, context, *rest) for context in CONTEXTS)
        rows.append([label, *(NONE if value is None else seconds(value) for value in times_to_first)])
    sparse = {"engine": "shadowkv", "kv": "turbo", "prefill": "auto", "quantization": "none"}
    shares = (number(PREFILL, "replayed_density", context=context, **sparse) for context in CONTEXTS)
    rows.append(["blocks that sparse prefill attends to", *(f"{100 * share:.1f} %" for share in shares)])
    return table(["first token after", *map(whole, CONTEXTS)], rows)


def jobs() -> str:
    """Table of many requests that arrive at once."""
    path, rows = "h200/mixed/summary.csv", []
    for requests, size, answer, quantization in (
        (64, 8192, 128, "none"),
        (48, 61184, 512, "none"),
        (48, 61184, 512, "fp8"),
    ):
        where = {"requests": requests, "input": size, "output": answer, "quantization": quantization}
        ours, theirs = line(path, engine="shadowkv", **where), matching(path, engine=VLLM, **where)
        speeds = [whole(float(found["output_tokens_per_s"])) for found in (ours, *theirs)]
        weights = "" if quantization == "none" else f", `--quantization {quantization}`"
        first = f"{float(ours['ttft_mean_s']):.1f} s"
        rows.append([f"{requests} × {whole(size)} + {answer}{weights}", f"{float(ours['wall_s']):.1f} s", first])
        rows[-1] += [*speeds, *[NONE] * (2 - len(speeds))]
    return table(["requests × prompt + answer", "all done", "first token, mean", "tokens/s", "vLLM, tokens/s"], rows)


ENGINES = {"shadowkv": "shadowkv", "shadowkv-direct": "the engine without HTTP", "vllm": "vLLM 0.26.0"}
CASES = ("poisson", "limits", "at-once", "long", "mixed-short", "mixed-long")


def serving() -> str:
    """Table of what a client sees of each server, in every case."""
    rows = []
    for case in CASES:
        for engine, label in ENGINES.items():
            for found in matching(SERVING, engine=engine, case=case):
                first, each, gap = (
                    " / ".join(_precise(float(found[f"{name}_{part}_ms"])) for part in parts)
                    for name, parts in (("ttft", ("mean", "p99")), ("tpot", ("mean", "p99")), ("itl", ("p99",)))
                )
                rows.append([f"`{case}`: {label}", first, each, gap, whole(float(found["output_tokens_per_s"]))])
    head = ["case: engine", "first token, ms: mean / p99", "ms a token: mean / p99", "gap, ms: p99", "tokens/s"]
    return table(head, rows)


def _precise(value: float) -> str:
    return whole(value) if value >= 20 else f"{value:.1f}"


def serving_short() -> str:
    """README's table: a few cases and figures of ``serving``."""

    def cell(engine: str, case: str, *columns: str) -> str:
        return " / ".join(_precise(number(SERVING, column, engine=engine, case=case)) for column in columns)

    first = ("ttft_mean_ms", "ttft_p99_ms")
    rate = number(SERVING, "rate", engine="shadowkv", case="limits")
    chosen = {
        "12 short requests a second: first token": ("poisson", *first),
        "their time a token": ("poisson", "tpot_mean_ms"),
        f"{rate:.0f} a second, the highest rate of both within 200 ms and 20 ms a token": ("limits", *first),
        "256 short requests at once, tokens/s": ("at-once", "output_tokens_per_s"),
        "a prompt of 61,184 tokens every 4 s: first token": ("long", *first),
        "8 short requests a second beside prompts of 122,000 tokens: their first token": (
            "mixed-short",
            *first,
        ),
    }
    rows = [[label, *(cell(engine, *what) for engine in ("shadowkv", "vllm"))] for label, what in chosen.items()]
    return table(["ms over HTTP: mean / p99", "shadowkv", "vLLM 0.26.0"], rows)


def readme_speed() -> str:
    """README's table of prompts and decode steps."""

    def prompt(context: int, *what: str) -> str:
        value = first_token(what[0], what[1], context, *what[2:])
        return NONE if value is None else seconds(value)

    chosen = (("full", "dense"), ("turbo", "auto"), ("turbo", "auto", "fp8"), ("bf16", "dense", "none", VLLM))
    rows = [[f"first token of {whole(context)} tokens", *(prompt(context, *w) for w in chosen)] for context in CONTEXTS]
    for context in CONTEXTS:
        full = decode_cell("full", context)
        cells = [full, decode_cell("turbo", context), decode_cell("turbo", context, "h200/throughput_fp8")]
        texts = _cells([*cells, vllm_cell("bf16", context)], [full] * 4)
        rows.append([f"decode at {whole(context)}: tokens/s (sequences)", *texts])
    return table(["one H200", "`full`", "`turbo`", "`turbo`, fp8 weights", "vLLM 0.26.0"], rows)


def reuse() -> str:
    """Table of prompts that were computed before."""

    def ours(case: str, tokens: int = 61440, on: str = "on") -> dict[str, str]:
        return line(REUSE, case=case, engine="shadowkv", reuse=on, tokens=tokens)

    def percentiles(found: dict[str, str]) -> str:
        return f"{float(found['ttft_p50_s']):.2f} / {float(found['ttft_p99_s']):.2f} s"

    vllm = {case: line(REUSE, case=case, engine=VLLM) for case in ("shared", "one-by-one", "trace")}
    restored = " / ".join(f"{1000 * float(ours('restore', size)['wall_s']):.0f} ms" for size in CONTEXTS[:2])
    disk = " / ".join(seconds(float(ours("disk", size)["wall_s"])) for size in CONTEXTS[:2])
    both = "61,440 / 124,928 tokens"
    rows = [
        [
            "48 questions at once about one document: all done",
            *(seconds(float(f["wall_s"])) for f in (ours("shared"), vllm["shared"])),
        ],
        [
            "one question after another: first token, p50 / p99",
            *map(percentiles, (ours("one-by-one"), vllm["one-by-one"])),
        ],
        [f"a document of {both} from host memory to the device", restored, NONE],
        [f"a request whose document of {both} is on disk", disk, NONE],
        ["40 chats over 24 documents: first token, p50 / p99", *map(percentiles, (ours("trace"), vllm["trace"]))],
        ["the same, `--reuse off`", percentiles(ours("trace", on="off")), NONE],
    ]
    return table(["", "shadowkv", "vLLM 0.26.0, prefix caching"], rows)


def hit(tier: str, engine: str = "shadowkv") -> str:
    """Returns the share of the chats' prompt tokens that were found on a tier."""
    return f"{100 * number(REUSE, f'hit_rate_{tier}', case='trace', engine=engine, reuse='on'):.0f} %"


def http_cost() -> str:
    """Returns the milliseconds that HTTP adds to the mean time to the first token."""
    with_it, without = (
        number(SERVING, "ttft_mean_ms", engine=engine, case="poisson") for engine in ("shadowkv", "shadowkv-direct")
    )
    return f"{with_it - without:.0f}"


TWO_CARDS = {
    "two cards": "two_cards",
    "two cards, sums through NCCL (`--disable-custom-all-reduce`)": "two_cards_nccl",
    "one card": "one_card",
    "one card, Qwen3-30B-A3B": "qwen3-30b-a3b",
    "one card, gpt-oss-20b": "gpt-oss-20b",
}


def two_cards() -> str:
    """Table of a server on two cards, and on one."""
    rows = []
    for label, name in TWO_CARDS.items():
        rate, once = (report(f"h200/two_cards/{name}-{case}.json") for case in ("rate", "at-once"))
        first = " / ".join(_precise(rate[f"{part}_ttft_ms"]) for part in ("mean", "p99"))
        each, gap = (_precise(rate[f"{part}_ms"]) for part in ("mean_tpot", "p99_itl"))
        rows.append([label, first, each, gap, whole(once["output_throughput"])])
    head = [
        "12 requests a second",
        "first token, ms: mean / p99",
        "ms a token",
        "gap, ms: p99",
        "256 at once, tokens/s",
    ]
    return table(head, rows)


def ranks() -> str:
    """Table of decode steps and prompts of 61,440 tokens, on one card and on two."""
    case, path = "llama-3.1-8b, auto prefill, {}", "h200/two_cards/ranks.csv"

    def cells(gpus: int) -> list[str]:
        def found(what: str, column: str) -> float:
            return number(path, column, case=case.format(what), gpus=gpus)

        alone = [f"{found('batch of 1', 'step_ms'):.2f} ms", seconds(found("prompt", "ttft_s"))]
        largest = _largest(f"{THROUGHPUT}/summary.csv", "turbo", 61440) if gpus == 1 else None  # of the same budget
        speed, batch = largest or (found("largest batch", "tokens_per_s"), int(found("largest batch", "batch")))
        return [*alone, f"{whole(speed)} ({batch})"]

    head = ["", "a step of one sequence", "first token", "largest batch: tokens/s (sequences)"]
    return table(head, [["one card", *cells(1)], ["two cards", *cells(2)]])


MIXES = ("1x1000000,40x61440", "1x124928,63x2048", "8x124928,48x8192", "4x249856,40x30720")


def mixes() -> str:
    """Table of decode steps whose rows have different lengths, with the present code and with earlier code."""
    rows = []
    for mix in MIXES:
        now, before = (report(f"h200/mixes/{folder}llama-3-8b-1m_turbo_{mix}.json") for folder in ("", "before/"))
        parts = mix.split(",")
        label = " and ".join(f"{count} × {int(size):,}" for count, size in (part.split("x") for part in parts))
        alone = [f"{now['step_ms'][part]:.2f} ms" for part in parts]
        both = [f"{found['step_ms']['together']:.2f} ms, {found['ratio']:.2f}" for found in (now, before)]
        rows.append([label, *alone, *both])
    return table(["rows of a step", "the first alone", "the second alone", "both, ratio", "before: both, ratio"], rows)


FIGURES: dict[str, Callable[..., str]] = {
    "one": one,
    "first-token": first,
    "decode": decode,
    "decode-h100": decode_h100,
    "gain": gain,
    "batch-gain": batch_gain,
    "hit": hit,
    "http-cost": http_cost,
    "prompts": prompts,
    "jobs": jobs,
    "serving": serving,
    "serving-short": serving_short,
    "readme-speed": readme_speed,
    "reuse": reuse,
    "two-cards": two_cards,
    "ranks": ranks,
    "mixes": mixes,
}
