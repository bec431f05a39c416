"""Figures of the quality that answers lose by compression: RULER's scores, next-token distributions, and lengths of
answers."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.figures.results import NONE, line, lines, matching, number, pooled, ruler, table, whole
from benchmarks.figures.speed import decode_cell
from benchmarks.serving.drafted_answers import is_wrong

DEFAULT = "turbo:prefill=sparse"
BEFORE = "values=rotated-3bit,min_budget=640"
"""Settings of the default before narrow keys had others: ``turbo`` was what ``turbo`` with these is today."""

FOUR_SEEDS = {
    name: f"h200/ruler_four_seeds/{folder}"
    for name, folder in {
        "SmolLM2, 16K": "smollm2_16k",
        "SmolLM2, 32K": "smollm2_32k",
        "Qwen, 16K": "qwen_16k",
        "Qwen, 32K": "qwen_32k",
    }.items()
}
"""Folders of RULER with today's defaults, and with those before (``BEFORE``): 1,300 samples from four held-out seeds
each. Not every folder has both."""

FORMER = {
    "SmolLM2, 64K": ("h200/ruler_64k_smollm2", 65536),
    "Qwen by YaRN, 64K": ("h200/ruler_64k_qwen", 65536),
}
"""RULER with the defaults up to 4c124996, on one held-out seed: folder and length of each row. Today's defaults were
not measured there."""


def four_seeds() -> str:
    """Table of the points that today's default costs, and the default before and its parts."""
    policies = {
        "`full`, sparse prefill": "full:prefill=sparse",
        "`turbo`, sparse prefill: **the default**": DEFAULT,
        "the default before: 3 bits, 640 tokens": f"{DEFAULT},{BEFORE}",
        "the same, dense prefill": f"turbo:{BEFORE}",
        "640 tokens of exact keys and values, dense prefill": "turbo:keys=dense,values=dense,min_budget=640",
    }
    columns = [pooled(folder) for folder in FOUR_SEEDS.values()]
    rows = [["`full`, dense prefill: score", *(str(scores["full"]) for scores in columns)]]
    for label, policy in policies.items():
        rows.append([label, *(str(scores.get(policy, NONE)) for scores in columns)])
    return table(["difference to `full`, points", *FOUR_SEEDS], rows)


def four_seeds_loss() -> str:
    """The range of the points that the default loses to ``full``."""
    lost = []
    for folder in FOUR_SEEDS.values():
        score = pooled(folder).get(DEFAULT)
        if score is not None and score.difference is not None:
            lost.append(-score.difference[0])
    return f"{min(lost):.1f} to {max(lost):.1f}"


def difference_over_seeds(folder: str, policy: str) -> str:
    """The difference of a policy to ``full``, over all seeds of a folder, for use in a sentence."""
    return str(pooled(folder)[policy]).strip("*")


def former_defaults() -> str:
    """Table of RULER with the former defaults."""
    policies = {
        "`full`, score": "full",
        "`full`, sparse prefill": "full:prefill=sparse",
        "`turbo`, sparse prefill": DEFAULT,
    }
    rows = []
    for column, (folder, length) in FORMER.items():
        rows.append([column, *(str(ruler(folder)[length, "all", kv]) for kv in policies.values())])
    return table(["points of RULER", *policies], rows)


def _cell(folder: str, length: int, task: str, policy: str) -> str:
    found = ruler(folder).get((length, task, policy))
    return NONE if found is None else str(found)


def differences(folder: str, length: str, *tasks: str) -> str:
    """Table of all policies of an evaluation: differences to ``full`` on ``tasks``, or over all tasks if none are
    given."""
    have = ruler(folder)
    policies = dict.fromkeys(policy for at, _, policy in have if at == int(length))
    shown = tasks or ("all",)
    rows = []
    for policy in policies:
        name, _, budget = policy.partition("@")
        label = f"`{name}`" + (f", budget {budget}" if budget else "") + (", score" if policy == "full" else "")
        rows.append([label, *(_cell(folder, int(length), task, policy) for task in shown)])
    return table(["difference to `full`", *(f"`{task}`" if task != "all" else "all" for task in shown)], rows)


def difference(folder: str, length: str, policy: str, task: str = "all") -> str:
    """One cell of ``differences``, for use in a sentence."""
    return str(ruler(folder)[int(length), task, policy]).strip("*")


SEED_11 = {"16K": ("h200/ruler", 16384), "32K": ("h200/ruler", 32768), "60K": ("h200/ruler_60k", 61440)}
SEED_0 = {"16K": ("h200/ruler_seed_0", 16384), "32K": ("h200/ruler_seed_0", 32768)}


def by_seed(columns: dict[str, tuple[str, int]], policies: tuple[str, ...]) -> str:
    """Table of differences to ``full`` of policies with dense prefill."""
    rows = []
    for policy in policies:
        cells = (_cell(folder, length, "all", policy) for folder, length in columns.values())
        rows.append([f"`{policy}`" + (", score" if policy == "full" else ""), *cells])
    return table(["SmolLM2, dense prefill", *columns], rows)


def presets() -> str:
    """README's table of presets."""
    at_32k, seed_0 = ("h200/ruler", 32768), ("h200/ruler_seed_0", 32768)
    chosen: tuple[tuple[str, tuple[str, ...], tuple[str, int]], ...] = (
        ("the most tokens per second (default)", ("turbo",), at_32k),
        ("longer contexts or more of them, with much host memory", ("turbo-host",), at_32k),
        ("nothing lost", ("full",), at_32k),
        ("every token attended to, least error", ("fp8",), at_32k),
        ("every token attended to, in 4 bits", ("turboquant-4",), seed_0),
        ("every token attended to, in 3 bits", ("turboquant-3",), seed_0),
        ("the least memory", ("shard",), ("h200/ruler_shard", 16384)),
        ("to compare with the paper", ("shadowkv", "shadowkv:place=device"), seed_0),
    )
    rows = []
    for wanted, names, (folder, length) in chosen:
        kv = names[0]
        memory = line("h200/formats/bytes.csv", kv=kv, context=61440)
        full = number("h200/formats/bytes.csv", "device_bytes_per_token", kv="full", context=61440)
        less = f"{full / float(memory['device_bytes_per_token']):.1f}×" if kv != "full" else "1×"
        host = " of the device" if float(memory["host_bytes_per_token"]) else ""
        of_seed = ruler(folder)[length, "all", names[-1]]
        score = pooled(FOUR_SEEDS["SmolLM2, 32K"])[DEFAULT] if kv == "turbo" else of_seed
        lost = "0" if score.difference is None else str(score)
        rows.append([wanted, f"`{kv}`", f"{less} less{host}" if kv != "full" else less, _speed(kv)])
        rows[-1].append(lost + (" (16K)" if length == 16384 else ""))
    head = ["you want", "`--kv`", "memory of a sequence", "decode at 60K", "RULER at 32K, points"]
    return table(head, rows)


def _speed(kv: str) -> str:
    cell, full = decode_cell(kv, 61440), decode_cell("full", 61440)
    if cell is None or full is None:
        return NONE
    return "1×" if kv == "full" else f"{cell[0] / full[0]:.1f}×"


def kl_32k() -> str:
    """Table of the KL to ``full`` at 32K, by model and kind of text."""
    folders = {"Qwen": "h200/fidelity_32k_qwen", "SmolLM2": "h200/fidelity_32k_smollm2"}
    rows = []
    policies = {
        "`full`, sparse prefill": "full:prefill=sparse",
        "`turbo`, sparse prefill (default up to 4c124996)": DEFAULT,
    }
    for label, kv in policies.items():
        cells = []
        for folder in folders.values():
            for texts in ("essays", "code"):
                found = line(f"{folder}/fidelity.csv", kv=kv, texts=texts)
                cells.append(f"{float(found['mean_kl']):.4f} ± {float(found['mean_kl_stderr']):.4f}")
        rows.append([label, *cells])
    today = (line("h200/fidelity_32k_texts/fidelity.csv", kv="turbo", texts=texts) for texts in ("essays", "code"))
    cells = [f"{float(found['mean_kl']):.4f} ± {float(found['mean_kl_stderr']):.4f}" for found in today]
    rows.append(["`turbo`, dense prefill (today's default)", *cells, NONE, NONE])
    return table(["nats a token", *(f"{name}, {texts}" for name in folders for texts in ("essays", "code"))], rows)


def fidelity() -> str:
    """Table of every policy at 16K: KL to ``full``, and how often the likeliest token is the same."""
    path, fp8 = "h200/fidelity/fidelity.csv", {found["kv"]: found for found in lines("h200/fidelity_fp8/fidelity.csv")}
    rows = []
    for found in lines(path):
        kl = f"{float(found['mean_kl']):.4f} ± {float(found['mean_kl_stderr']):.4f}" if found["kv"] != "full" else "0"
        other = fp8.get(found["kv"])
        cell = f"{float(other['mean_kl']):.3f} ± {float(other['mean_kl_stderr']):.3f}" if other else NONE
        rows.append([f"`{found['kv']}`", kl, f"{100 * float(found['top1_agreement']):.1f} %", cell])
    return table(["", "KL, nats a token", "same likeliest token", "KL with `--quantization fp8`"], rows)


EIGHT_BITS = "turbo:rank=256,values=lloyd-8bit,keys=low-rank-int8@1024"


def gemma() -> str:
    """Table of RULER's scores for a model with sliding windows and a single kv head."""
    columns = {
        "4K": ("h200/ruler_gemma", 4096),
        "8K": ("h200/ruler_gemma", 8192),
        "8K, seed 72": ("h200/choices/rank_gemma_8k", 8192),
    }
    policies = {
        "`full`, score": "full",
        "`turbo:rank=128`, half of the dimensions": "turbo",  # the default when these were measured
        "`turbo`: all 256": "turbo:rank=256",
        "`turbo:budget=512`": "turbo:rank=256@512",
        "`turbo:keys=low-rank-int8`": "turbo:rank=256,keys=low-rank-int8",
        "`turbo:keys=low-rank-int8,values=lloyd-8bit,budget=1024`": EIGHT_BITS,
    }
    rows = [
        [label, *(_cell(folder, length, "all", policy) for folder, length in columns.values())]
        for label, policy in policies.items()
    ]
    return table(["Gemma-3-270M", *columns], rows)


def lengths() -> str:
    """Table of open-ended answers: how long they are, and how they end."""
    rows = []
    for name, folder in (("SmolLM2", "h200/open_ended_smollm2"), ("Qwen", "h200/open_ended_qwen")):
        for length in (16384, 32768):
            where = {"length": length, "task": "all"}
            full = line(f"{folder}/open_ended.csv", policy="full", **where)
            turbo = line(f"{folder}/open_ended.csv", policy=DEFAULT, **where)
            cells = [whole(float(full["output_tokens"]))]
            cells.append(f"{_difference(turbo, 'output_tokens', 1, '.0f')} tokens")
            cells += [f"{100 * float(full[kind]):.0f} %" for kind in ("ended", "looping")]
            cells += [f"{_difference(turbo, kind, 100, '.0f')} points" for kind in ("ended", "looping")]
            rows.append([f"{name}, {length // 1024}K", cells[0], cells[1], cells[2], cells[4], cells[3], cells[5]])
    head = ["", "`full`: tokens", "default", "`full`: ended by itself", "default", "`full`: ended in a loop", "default"]
    return table(head, rows)


def kinds() -> str:
    """Table for texts other than essays, measured on a CPU: KL to ``full``, and accepted drafts."""
    rows = []
    for kind in ("code", "logs", "tables"):
        for kv in ("fp8", "turbo"):
            found = line("cpu/kinds/fidelity_4k/fidelity.csv", texts=kind, kv=kv)
            kl = f"{float(found['mean_kl']):.4f} ± {float(found['mean_kl_stderr']):.4f}"
            shares = (_share(found, name) for name in ("top1_agreement", "acceptance_rate"))
            rows.append([f"{kind}, `{kv}`", kl, *shares, found["prompts"]])
    return table(["", "KL, nats a token", "same likeliest token", "accepted drafts", "prompts"], rows)


DRAFTED = "cpu/speculation/answers.csv"


def drafted_answers() -> str:
    """Table of how many answers of SmolLM2 with drafts are those without, token by token."""
    rows, model = [], {"model": "smollm2-135m-64k", "kv": "full", "dtype": "float32"}
    cells = {(int(found["length"]), found["method"]) for found in matching(DRAFTED, **model)}
    for length, method in sorted(cells, reverse=True):
        cell = matching(DRAFTED, **model, length=length, method=method)
        equal, near_ties, drafted, accepted = (
            sum(int(found[name]) for found in cell) for name in ("equal", "near_ties", "drafted", "accepted")
        )
        wrong, other = sum(map(is_wrong, cell)), sum(bool(found["gap"]) for found in cell)
        tasks = len({found["task"] for found in cell})
        counts = map(whole, (tasks, len(cell), equal, other - wrong, wrong, near_ties))
        drafts = f"{whole(accepted)} of {whole(drafted)}"
        rows.append([f"`{method}`, {whole(length)}", *counts, drafts, f"{max(float(f['error']) for f in cell):.1g}"])
    head = ["drafts, length", "tasks", "answers", "equal tokens", "answers that differ at a near tie", "elsewhere"]
    return table([*head, "near ties", "accepted drafted tokens", "largest error, nats"], rows)


def _share(found: dict[str, str], name: str) -> str:
    return f"{100 * float(found[name]):.1f} ± {100 * float(found[f'{name}_stderr']):.1f} %"


def _difference(found: dict[str, str], name: str, scale: float, form: str) -> str:
    value, error = (scale * float(found[f"{name}_difference{part}"]) for part in ("", "_stderr"))
    return f"{value:+{form}} ± {error:{form}}"


def budgets() -> str:
    """Table of RULER's scores at 16K, by policy and budget."""
    folder, shares = "h200/ruler_budgets", {"0.4 %": ("@0.004", "@0.004"), "0.8 %": ("@0.008", "@0.008")}
    shares |= {"1.56 %": ("@0.0156", ""), "3.1 %": ("@0.031", "@0.03125"), "6.25 %": ("@0.0625", "@0.0625")}
    rows = []
    for policy in ("turbo", "shadowkv:place=device", "quest"):
        cells = (_cell(folder, 16384, "all", policy + suffixes[policy != "turbo"]) for suffixes in shares.values())
        rows.append([f"`{policy}`", *cells])
    return table(["share of the context that a step attends to", *shares], rows)


FIGURES: dict[str, Callable[..., str]] = {
    "four-seeds": four_seeds,
    "four-seeds-loss": four_seeds_loss,
    "difference-over-seeds": difference_over_seeds,
    "former-defaults": former_defaults,
    "differences": differences,
    "difference": difference,
    "seed-11": lambda: by_seed(SEED_11, ("full", "turbo", "turbo:rank=32", "turbo-host", "fp8")),
    "seed-0": lambda: by_seed(
        SEED_0,
        ("full", "turbo", "turbo:key_groups=3", "turboquant-4", "turboquant-3", "shadowkv:place=device", "quest"),
    ),
    "presets": presets,
    "kl-32k": kl_32k,
    "fidelity": fidelity,
    "gemma": gemma,
    "lengths": lengths,
    "kinds": kinds,
    "budgets": budgets,
    "drafted-answers": drafted_answers,
}
