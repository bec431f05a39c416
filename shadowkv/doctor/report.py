"""The report of ``shadowkv doctor``: as text with one table of the ops, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shadowkv.doctor.machine import Machine
from shadowkv.doctor.ops import Choices, OpChoice
from shadowkv.ops.extension import dotted
from shadowkv.wording import GIB, counted

HEADINGS = ("op", "runs in", "why no faster backend", "what to do")
LANGUAGES = {"cpu": "C++", "cuda": "CUDA", "triton": "Triton", "reference": "PyTorch"}
"""Maps the beginning of a backend's name to the language of the backend. A backend whose name begins differently is
named after the package that it calls."""


def as_json(machine: Machine, choices: Choices) -> dict[str, Any]:
    """Returns the whole report as a JSON object."""
    chosen = {
        "model": choices.model,
        "kv": choices.kv,
        "device": str(choices.device),
        "attention_backend": choices.attention_backend,
    }
    return {"machine": asdict(machine), "chosen_for": chosen, "ops": [asdict(choice) for choice in choices.ops]}


def as_text(machine: Machine, choices: Choices) -> str:
    """Returns the report as text: the machine, the ops that are called, the other ops, and a last line that says
    whether anything could be faster."""
    ops = sorted(choices.ops, key=lambda choice: not choice.called)
    remedies = list(dict.fromkeys(choice.remedy for choice in ops if choice.remedy))
    rows = [HEADINGS, *(_row(choice, remedies) for choice in ops)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    slow = [choice.op for choice in ops if choice.called and choice.remedy]
    verdict = f"{counted(len(slow), 'op')} could be faster here: {', '.join(slow)}" if slow else "Nothing to do."
    return "\n".join(
        [
            *(f"{name:14}{text}" for name, text in _findings(machine)),
            "",
            f"Ops of {choices.model} with {choices.kv} on {choices.device}, with uncalled ops in brackets.",
            "Ops without a reason use the fastest backend.",
            "",
            *table,
            "",
            *(f"({number}) {remedy}" for number, remedy in enumerate(remedies, start=1)),
            verdict,
        ]
    )


def _row(choice: OpChoice, remedies: list[str]) -> tuple[str, ...]:
    kind, _, variant = choice.backend.partition("_")
    backend = LANGUAGES.get(kind, choice.backend)
    if variant and kind in LANGUAGES:
        backend += f" ({choice.backend})"
    todo = f"build it ({remedies.index(choice.remedy) + 1})" if choice.remedy else ""
    return choice.op if choice.called else f"({choice.op})", backend, choice.reason or "", todo


def _findings(machine: Machine) -> list[tuple[str, str]]:
    built = "a CPU build" if machine.cuda_runtime is None else f"CUDA {machine.cuda_runtime}"
    gpus = [
        f"{gpu.name}, compute capability {dotted(gpu.capability)}, {gpu.total_bytes / GIB:.1f} GiB"
        for gpu in machine.gpus
    ]
    missing = [f"{name}: {command}" for name, command in machine.extras.items() if command]
    installed = ", ".join(name for name, command in machine.extras.items() if command is None)
    return [
        ("shadowkv", f"{machine.shadowkv}, {'installed' if machine.source is None else f'from {machine.source}'}"),
        ("Python", machine.python),
        ("torch", f"{machine.torch}, {built}; Triton {machine.triton or 'is not installed'}"),
        ("driver", machine.driver or "no NVIDIA driver"),
        *(("GPU", text) for text in gpus or [f"none{f': {machine.gpu_problem}' if machine.gpu_problem else ''}"]),
        ("CPU", f"{counted(machine.cores, 'core')}, {machine.simd}"),
        ("memory", f"{machine.free_bytes / GIB:.1f} of {machine.total_bytes / GIB:.1f} GiB free"),
        ("C++ compiler", machine.cpp_compiler),
        ("CUDA compiler", machine.cuda_compiler),
        ("C++ ops", machine.cpp_ops),
        ("CUDA ops", machine.cuda_ops),
        ("extras", installed or "none"),
        *(("", f"to add {text}") for text in missing),
    ]
