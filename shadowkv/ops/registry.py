"""Chooses the backend of every op, once, where an engine is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from shadowkv.ops.case import Case
from shadowkv.ops.dense_attention.forms import DenseAttention
from shadowkv.ops.extension import Unbuilt
from shadowkv.ops.references import References
from shadowkv.wording import SettingsError

NAMES = tuple(vars(References()))
"""All ops."""

FORMS = {"dense_attention": tuple(field.name for field in fields(DenseAttention))}
"""Ops of whose calls few backends serve all. The backend of each form of a call is chosen by itself; its function has
the form's name."""

CALLS = tuple(f"{name}.{form}" if form else name for name in NAMES for form in FORMS.get(name, ("",)))
"""What backends are chosen for: ops, and of those with forms each form: ``dense_attention.packed``."""

PREFERENCE = {
    "cuda": (
        *("cuda_sm90", "cuda", "cuda_masked", "cuda_fp8", "cuda_mixed_sm90"),
        *("cuda_selected_sm90", "cuda_selected", "fla", "triton", "triton_selected", "humming", "reference"),
    ),
    "cpu": ("cpu", "reference"),
}
"""Backends by device type, fastest first; an op need not have all of them, but always has ``reference.py``."""

LIBRARIES = {"flashinfer": "flashinfer", "flash-attn": "flash_attn"}
"""The backends that call another package's attention, by what ``--attention-backend`` calls them. ``auto`` asks them
first for the forms and head dims that a module has as ``FASTER_AT``: those where it was measured to be faster."""


@dataclass(frozen=True)
class Choice:
    """The backend of an op, or of a form of its calls.

    Attributes:
        backend: its name, that of its file in the op's folder.
        function: the op, or what serves the form.
        synchronises: whether it makes the host wait for the device.
        needs_lengths: whether the host has to know how long packed sequences are.
        reasons: faster backends that are not used, and why: ``name: reason``.
        unbuilt: why the first of these cannot be used whose library another build would provide; None if there is none.
    """

    backend: str
    function: Callable[..., Any]
    synchronises: bool
    needs_lengths: bool
    reasons: list[str]
    unbuilt: str | None = None


def choose(
    name: str,
    device: torch.device | str,
    case: Case | None = None,
    override: str | None = None,
    attention_backend: str = "auto",
) -> Choice:
    """The fastest backend of ``name``, one of ``CALLS``, that ``device`` has and that supports ``case``, or the one
    that ``override`` names. None for a case skips the check of what backends support; ``attention_backend`` is as for
    ``Ops``. Raises ValueError as ``Ops`` does."""
    kind = torch.device(device).type
    if kind not in PREFERENCE:
        raise ValueError(f"no ops for devices of type {kind!r}; use {' or '.join(PREFERENCE)}")
    backends, passed_over = _preferred(kind, attention_backend) if override is None else (override,), list[str]()
    unbuilt: str | None = None
    op, _, form = name.partition(".")
    for backend in backends:
        path = f"shadowkv.ops.{op}.{backend}"
        if find_spec(path) is None:
            continue
        module = import_module(path)
        function = getattr(module, form or op, None)
        if function is None:
            continue
        unasked = attention_backend == "auto" and override is None and backend in LIBRARIES.values()
        if unasked and (case is None or case.head_dim not in getattr(module, "FASTER_AT", {}).get(form, ())):
            continue
        reasons: list[str] = getattr(module, "missing", lambda: [])()
        if unbuilt is None:
            unbuilt = next((reason for reason in reasons if isinstance(reason, Unbuilt)), None)
        if not reasons and case is not None:
            reasons = getattr(module, "supports", lambda case: [])(case)
        if not reasons:
            synchronises = getattr(module, "SYNCHRONISES", False)
            needs_lengths = kind == "cuda" and form in getattr(module, "NEEDS_LENGTHS", ())
            return Choice(backend, function, synchronises, needs_lengths, passed_over, unbuilt)
        passed_over.append(f"{backend}: {'; '.join(reasons)}")
    why = f": {'; '.join(passed_over)}" if passed_over else ""
    raise ValueError(f"op {name!r} has no backend {backends[0]!r} here{why}")


def _preferred(kind: str, attention_backend: str) -> tuple[str, ...]:
    """Backends for devices of a type in the order in which they are asked."""
    if attention_backend == "auto" and kind == "cuda":
        return (*LIBRARIES.values(), *PREFERENCE[kind])
    library = LIBRARIES.get(attention_backend)
    return PREFERENCE[kind] if library is None else (library, *PREFERENCE[kind])


class Ops(References):
    """The ops of an engine, each as an attribute: made once, where it is loaded, for its model's layers, its cache and
    its sampler.

    Each comes from the fastest backend that the device has and that supports the case. A backend may define
    ``missing()``, the reasons why it cannot run here, and ``supports(case)``, the reasons why it cannot serve a case;
    each is empty if it can. Once chosen, it handles the arguments of each call or raises.

    Args:
        device: where the ops will run.
        case: what they will be called with; None skips the check of what backends support.
        overrides: backend by op, or by form of one, for tests and comparisons.
        attention_backend: of ``load_settings.ATTENTION_BACKENDS``: ``shadowkv`` is ``PREFERENCE``, ``auto`` the same,
            after ``LIBRARIES`` where these are faster; in one of them run the ops that have a backend of it which
            serves, others as ever.

    Attributes:
        called: those of ``CALLS`` that the case has; all without a case.
        backends: backend of each of ``CALLS``.
        reasons: faster backends of each of them that are not used, and why: ``name: reason``.
        unbuilt: ops of ``called`` that would have a faster backend if its library had been built, or could be loaded,
            and why it is not.
        synchronising: those of ``called`` that make the host wait for the device, so that they cannot be captured in a
            graph.
        needing_lengths: those of ``called`` for which the host has to know how long packed sequences are: a graph would
            hold the lengths that it was captured with.

    Raises:
        ValueError: an override names an unknown op, or a backend that the op does not have or that cannot serve.
        SettingsError: no called op can run in the library that ``attention_backend`` names; with the reasons.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        case: Case | None = None,
        overrides: Mapping[str, str] | None = None,
        attention_backend: str = "auto",
    ) -> None:
        super().__init__()
        overrides = dict(overrides or {})
        unknown = sorted(set(overrides) - {*NAMES, *CALLS})
        if unknown:
            raise ValueError(f"unknown ops {', '.join(unknown)}; known: {', '.join(NAMES)}")
        self.case, self.called = case, frozenset(CALLS) if case is None else case.ops
        self.backends: dict[str, str] = {}
        self.reasons: dict[str, list[str]] = {}
        self.unbuilt: dict[str, str] = {}
        self.synchronising: list[str] = []
        self.needing_lengths: list[str] = []
        functions: dict[str, Callable[..., Any]] = {}
        for name in CALLS:
            override = overrides.get(name, overrides.get(name.partition(".")[0]))
            choice = choose(name, device, case if name in self.called else None, override, attention_backend)
            self.backends[name], self.reasons[name] = choice.backend, choice.reasons
            if name in self.called and choice.unbuilt is not None:
                self.unbuilt[name] = choice.unbuilt
            if name in self.called and choice.synchronises:
                self.synchronising.append(name)
            if name in self.called and choice.needs_lengths:
                self.needing_lengths.append(name)
            functions[name] = choice.function
        for name in NAMES:
            if name not in FORMS:
                setattr(self, name, functions[name])
        forms = {form: functions[f"dense_attention.{form}"] for form in FORMS["dense_attention"]}
        self.dense_attention = DenseAttention(**forms)
        if attention_backend in LIBRARIES:
            self._check_library(attention_backend)

    def _check_library(self, name: str) -> None:
        """Raises SettingsError where no called op has a backend that can run."""
        backend = LIBRARIES[name]
        if any(self.backends[op] == backend for op in self.called):
            return
        refused = (reason for op in sorted(self.called) for reason in self.reasons[op])
        reasons = dict.fromkeys(reason.partition(": ")[2] for reason in refused if reason.startswith(f"{backend}: "))
        why = "; ".join(reasons) or "no op that is called has a backend of it"
        raise SettingsError(f"attention_backend={name!r} can serve no attention here: {why}", ["attention_backend"])
