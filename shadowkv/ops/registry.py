"""Chooses the backend of every op. ``engine/startup/loading.py`` makes ``Ops`` once, when an engine is loaded. Other
packages can ``register`` backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from shadowkv.ops.case import Case
from shadowkv.ops.extension import Unbuilt
from shadowkv.ops.references import References
from shadowkv.wording import SettingsError

_REFERENCES = vars(References())
NAMES = tuple(_REFERENCES)
"""All ops."""

FORMS = {name: tuple(field.name for field in fields(op)) for name, op in _REFERENCES.items() if is_dataclass(op)}
"""Forms of each op whose reference is a dataclass of functions, such as ``DenseAttention``. Each form has its own
backend, whose function has the form's name."""

CALLS = tuple(f"{name}.{form}" if form else name for name in NAMES for form in FORMS.get(name, ("",)))
"""Everything that has a backend: each op, and instead of an op with forms each form, such as
``dense_attention.packed``."""

PREFERENCE = {
    "cuda": (
        *("cuda_sm90", "cuda", "cuda_masked", "cuda_fp8", "cuda_mixed_sm90"),
        *("cuda_selected_sm90", "cuda_selected", "fla", "triton", "triton_selected", "humming", "reference"),
    ),
    "cpu": ("cpu", "reference"),
}
"""Backends by device type, fastest first. An op need not have all of them, but always has ``reference.py``."""

LIBRARIES = {"flashinfer": "flashinfer", "flash-attn": "flash_attn"}
"""Backends that call another package's attention, by their name in ``--attention-backend``. With ``auto``, such a
backend is asked first for the forms and head dims in its module's ``FASTER_AT``, at which it was measured to be
faster."""


@dataclass(frozen=True)
class Outside:
    """A backend from outside the package.

    Attributes:
        module: what ``choose`` reads, as from a backend's file; or the function alone.
        device_types: types of devices that it runs on.
        preferred: whether it is asked before all others. If not, it serves only where an override names it.
    """

    module: ModuleType | Callable[..., Any]
    device_types: tuple[str, ...]
    preferred: bool


REGISTERED: dict[str, dict[str, Outside]] = {}
"""Backends from outside the package, by call and name."""


def register(
    call: str,
    name: str,
    backend: ModuleType | Callable[..., Any],
    *,
    device_types: tuple[str, ...] = tuple(PREFERENCE),
    preferred: bool = True,
) -> None:
    """Registers a backend from outside the package, before an engine is loaded. Registering it again changes nothing.

    Args:
        call: one of ``CALLS``, such as ``rms_norm`` or ``dense_attention.packed``.
        name: the backend's name.
        backend: a function with the signature of the op's reference, or a module that has it under the name of the op,
            or of the form. A module can also have ``supports``, ``missing``, ``SYNCHRONISES`` and ``NEEDS_LENGTHS``, as
            files of backends have.
        device_types: ``cpu``, ``cuda`` or both.
        preferred: whether it is asked before all other backends. If not, it serves only where an override names it.

    Raises:
        ValueError: there is no such call or device type, or the call has a backend of this name.
        TypeError: ``backend`` is no function, and no module that has it.
    """
    op, _, form = call.partition(".")
    if call not in CALLS:
        raise ValueError(f"there is no op {call!r}: the calls are {', '.join(CALLS)}")
    if unknown := [kind for kind in device_types if kind not in PREFERENCE]:
        raise ValueError(f"no ops for devices of type {unknown[0]!r}; use {' or '.join(PREFERENCE)}")
    if not callable(getattr(backend, form or op, None) if isinstance(backend, ModuleType) else backend):
        raise TypeError(f"backend {name!r} of {call} is no function, nor a module with a function {form or op!r}")
    outside, known = Outside(backend, device_types, preferred), REGISTERED.setdefault(call, {})
    if known.get(name, outside) != outside or _file(op, name) is not None:
        raise ValueError(f"{call} has a backend {name!r} already")
    known[name] = outside


@dataclass(frozen=True)
class Choice:
    """The chosen backend of one of ``CALLS``.

    Attributes:
        backend: name of the backend, that of its file in the op's folder or of its registration.
        outside: whether it was registered from outside the package.
        function: the backend's function.
        synchronises: whether it makes the host wait for the device.
        needs_lengths: whether the host must know the lengths of packed sequences.
        reasons: faster backends that are not used, and why: ``name: reason``.
        unbuilt: why a faster backend's library cannot be used, if another build would remedy it. The first such reason,
            or None.
    """

    backend: str
    function: Callable[..., Any]
    synchronises: bool
    needs_lengths: bool
    reasons: list[str]
    unbuilt: str | None = None
    outside: bool = False


def choose(
    name: str,
    device: torch.device | str,
    case: Case | None = None,
    override: str | None = None,
    attention_backend: str = "auto",
) -> Choice:
    """The fastest backend of ``name``, one of ``CALLS``, that runs on ``device`` and supports ``case``; or the backend
    that ``override`` names. ``case``, ``attention_backend`` and the errors are those of ``Ops``."""
    kind = torch.device(device).type
    if kind not in PREFERENCE:
        raise ValueError(f"no ops for devices of type {kind!r}; use {' or '.join(PREFERENCE)}")
    outside = {own: one for own, one in REGISTERED.get(name, {}).items() if kind in one.device_types}
    asked = (*(own for own, one in outside.items() if one.preferred), *_preferred(kind, attention_backend))
    backends, passed_over = asked if override is None else (override,), list[str]()
    unbuilt: str | None = None
    op, _, form = name.partition(".")
    for backend in backends:
        module = outside[backend].module if backend in outside else _file(op, backend)
        function = getattr(module, form or op, None) if isinstance(module, ModuleType) else module
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
            return Choice(backend, function, synchronises, needs_lengths, passed_over, unbuilt, backend in outside)
        passed_over.append(f"{backend}: {'; '.join(reasons)}")
    why = f": {'; '.join(passed_over)}" if passed_over else ""
    raise ValueError(f"op {name!r} has no backend {backends[0]!r} here{why}")


def _file(op: str, backend: str) -> ModuleType | None:
    """The file of a backend in the op's folder; None if it has none of this name."""
    path = f"shadowkv.ops.{op}.{backend}"
    return None if find_spec(path) is None else import_module(path)


def _preferred(kind: str, attention_backend: str) -> tuple[str, ...]:
    """Backends for a type of device, in the order in which they are asked."""
    if attention_backend == "auto" and kind == "cuda":
        return (*LIBRARIES.values(), *PREFERENCE[kind])
    library = LIBRARIES.get(attention_backend)
    return PREFERENCE[kind] if library is None else (library, *PREFERENCE[kind])


class Ops(References):
    """The ops of an engine, each as an attribute. Its model's layers, its cache and its sampler share them.

    Each op has the fastest backend that runs on the device and supports the case. A backend may define ``missing()``,
    the reasons why it cannot run here, and ``supports(case)``, the reasons why it cannot serve a case. A backend
    without reasons is chosen. It must then handle the arguments of each call or raise.

    Args:
        device: where the ops will run.
        case: the properties of their arguments. None skips ``supports``.
        overrides: backend by op, or by form of an op, for tests and comparisons.
        attention_backend: one of ``load_settings.ATTENTION_BACKENDS``. ``shadowkv`` uses ``PREFERENCE``. ``auto`` uses
            ``LIBRARIES`` where they are faster, then ``PREFERENCE``. The name of a library uses its backends wherever
            they serve, then ``PREFERENCE``.

    Attributes:
        called: those of ``CALLS`` that the case calls; all without a case.
        backends: backend of each of ``CALLS``.
        outside: those of ``called`` whose backend was registered from outside the package.
        reasons: faster backends of each that are not used, and why: ``name: reason``.
        unbuilt: those of ``called`` that another build would give a faster backend, and why it cannot be used.
        synchronising: those of ``called`` that make the host wait for the device. They cannot be captured in a graph.
        needing_lengths: those of ``called`` for which the host must know the lengths of packed sequences. A graph would
            keep the lengths of its capture.

    Raises:
        ValueError: an override names an unknown op, or a backend that the op does not have or that cannot serve.
        SettingsError: the library that ``attention_backend`` names serves no called op; with the reasons.
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
        self.outside: list[str] = []
        self.reasons: dict[str, list[str]] = {}
        self.unbuilt: dict[str, str] = {}
        self.synchronising: list[str] = []
        self.needing_lengths: list[str] = []
        functions: dict[str, Callable[..., Any]] = {}
        for name in CALLS:
            override = overrides.get(name, overrides.get(name.partition(".")[0]))
            choice = choose(name, device, case if name in self.called else None, override, attention_backend)
            self.backends[name], self.reasons[name] = choice.backend, choice.reasons
            if name in self.called and choice.outside:
                self.outside.append(name)
            if name in self.called and choice.unbuilt is not None:
                self.unbuilt[name] = choice.unbuilt
            if name in self.called and choice.synchronises:
                self.synchronising.append(name)
            if name in self.called and choice.needs_lengths:
                self.needing_lengths.append(name)
            functions[name] = choice.function
        for name in NAMES:
            forms = {form: functions[f"{name}.{form}"] for form in FORMS.get(name, ())}
            setattr(self, name, replace(getattr(self, name), **forms) if forms else functions[name])
        if attention_backend in LIBRARIES:
            self._check_library(attention_backend)

    def _check_library(self, name: str) -> None:
        """Raises SettingsError if the library serves no called op."""
        backend = LIBRARIES[name]
        if any(self.backends[op] == backend for op in self.called):
            return
        refused = (reason for op in sorted(self.called) for reason in self.reasons[op])
        reasons = dict.fromkeys(reason.partition(": ")[2] for reason in refused if reason.startswith(f"{backend}: "))
        why = "; ".join(reasons) or "no op that is called has a backend of it"
        raise SettingsError(f"attention_backend={name!r} can serve no attention here: {why}", ["attention_backend"])
