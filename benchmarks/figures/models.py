"""Figures of quantized weights, of mixtures of experts and of models with sliding windows, all on an H200; and figures
of CPUs."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.figures.results import NONE, line, matching, report, seconds, table, times, whole

WEIGHTS = "h200/weights/summary.csv"
MODELS = "h200/models/summary.csv"
FORMATS = {
    "bfloat16": "bfloat16",
    "int4-g128": "int4 by groups of 128",
    "nvfp4": "NVFP4",
    "mxfp4": "MXFP4",
    "fp8-g128": "fp8 by groups of 128, activations in bfloat16",
    "fp8": "fp8 by rows, 8-bit arithmetic (`--quantization fp8`)",
}
CONTEXTS = (61440, 124928)


def weights() -> str:
    """Table of Llama-3.1-8B's speed with weights in every format."""

    def row(label: str, **where: str) -> list[str]:
        lines = {int(found["context"]): found for found in matching(WEIGHTS, model="llama-3.1-8b", **where)}
        size, first = lines[1024]["weights_gib"], lines[61440]["ttft_s"]
        speeds = [_speed(lines[context]) for context in CONTEXTS]
        one = f"{float(lines[1024]['step_ms']):.2f} ms"
        compared = where["format"] in ("bfloat16", "int4-g128", "fp8-g128", "mxfp4")  # with the same blocks in prefills
        shown = seconds(float(first)) if first and compared else NONE
        return [label, f"{float(size):.1f}" if size else NONE, *speeds, one, shown]

    rows = [row("bfloat16, `full`", format="bfloat16", kv="full")]
    rows += [row(label, format=name, kv="turbo") for name, label in FORMATS.items()]
    rows.append(row("int4 (GPTQ), vLLM 0.26.0, fp8 cache", format="int4-g128", kv="fp8"))
    head = ["weights", "GiB", *(f"tokens/s at {whole(context)}" for context in CONTEXTS)]
    return table([*head, "a step of one sequence of 1,024", "first token of 61,440"], rows)


def _speed(found: dict[str, str]) -> str:
    return f"{whole(float(found['tokens_per_s']))} ({found['batch']})"


def weights_ratio(numerator: str, denominator: str, context: str, column: str = "tokens_per_s") -> str:
    """Quotient of two figures of Llama-3.1-8B. Numerator and denominator each name a format and a policy, as
    ``int4-g128,turbo``."""
    values = []
    for pair in (numerator, denominator):
        form, kv = pair.split(",")
        found = line(WEIGHTS, model="llama-3.1-8b", format=form, kv=kv, context=int(context))
        values.append(float(found[column]))
    return times(values[0] / values[1])


NAMED = {
    "qwen3-30b-a3b-2507": "Qwen3-30B-A3B",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "gemma-3-27b": "Gemma-3-27B",
}
WRITTEN = {"bfloat16": "bfloat16", "int4-g128": "int4", "mxfp4": "MXFP4"}


def models() -> str:
    """Table of the speed of mixtures of experts and models with sliding windows."""
    rows = []
    for model, name in NAMED.items():
        for form in dict.fromkeys(found["format"] for found in matching(MODELS, model=model)):
            cells = [f"{name}, {WRITTEN[form]}"]
            for context in CONTEXTS:
                full, turbo = (
                    matching(MODELS, model=model, format=form, kv=kv, context=context) for kv in ("full", "turbo")
                )
                vllm = matching(MODELS, model=model, format=form, kv="fp8", context=context)
                cells += [_speed(found[0]) if found else NONE for found in (full, vllm, turbo)]
                if full and turbo:
                    cells[-1] += f", {times(float(turbo[0]['tokens_per_s']) / float(full[0]['tokens_per_s']))}"
            alone = line(MODELS, model=model, format=form, kv="turbo", context=1024)
            rows.append([*cells, f"{float(alone['step_ms']):.2f} ms"])
    kinds = ("`full`", "vLLM, fp8 cache", "`turbo`")
    head = [f"{kind}, {whole(context)}" for context in CONTEXTS for kind in kinds]
    return table(["tokens/s (sequences)", *head, "a step of one sequence of 1,024"], rows)


SMOLLM2, QWEN2_5 = "SmolLM2-135M, Q4_1", "Qwen2.5-Coder-1.5B, Q4_K_M"
QWEN3_5 = "Qwen3.5-0.8B's shapes, random weights, Q4_K"
PEERS = {
    (SMOLLM2, "one user, 60 words"): "peer_smollm2",
    (SMOLLM2, "one user, 825 words"): "peer_smollm2",
    (SMOLLM2, "eight users, 60 words"): "peer_smollm2",
    (QWEN2_5, "one user, 60 words"): "peer_qwen2_5",
    (QWEN2_5, "one user, 825 words"): "peer_qwen2_5",
    (QWEN2_5, "eight users, 60 words"): "peer_qwen2_5",
    (QWEN3_5, "one user, 2,048 words"): "peer_qwen3_5",
}


def peer(model: str, case: str, figure: str, kind: str = "ratio median") -> float:
    """A figure of a run in which llama.cpp's server ran beside ours. Ratios are our figure divided by llama.cpp's."""
    return float(report(f"cpu/{PEERS[model, case]}.json")["summary"][case][figure][kind])


def cpus() -> str:
    """Table of medians of our server and of llama.cpp's, with two threads each."""
    rows = []
    for model, case in PEERS:
        each = [f"{peer(model, case, 'tpot', f'{engine} median'):.1f}" for engine in ("shadowkv", "llama.cpp")]
        ratios = (
            peer(model, case, figure) for figure in ("tpot", "prompt_tokens_per_s", "tokens_per_s", "cpu_ms_per_token")
        )
        rows.append([f"{model}: {case}", " / ".join(each), *(times(ratio) for ratio in ratios)])
    head = [
        "ours to llama.cpp's",
        "ms a token: ours / llama.cpp's",
        "ratio",
        "prompt tokens/s",
        "tokens/s",
        "CPU time a token",
    ]
    return table(head, rows)


def frontend() -> str:
    """Table of the HTTP process, measured without an engine."""
    found = report("cpu/frontend.json")
    rows = []
    for case in ("paced", "overload"):
        at = found[case]
        speeds = (whole(at[name]) for name in ("delivered", "events"))
        delay = f"{at['median_delay_ms']:.1f} / {at['p99_delay_ms']:.1f} ms"
        rows.append([f"`{case}`", *speeds, f"{at['tokens_per_event']:.2f}", f"{at['us_per_event']:.1f} µs", delay])
    head = ["", "tokens/s", "events/s", "tokens an event", "core time an event", "delay of a token: p50 / p99"]
    return table(head, rows)


FIGURES: dict[str, Callable[..., str]] = {
    "weights": weights,
    "weights-ratio": weights_ratio,
    "models": models,
    "cpus": cpus,
    "frontend": frontend,
}
