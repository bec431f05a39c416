"""Chooses the backend of every op. ``engine/startup/loading.py`` makes ``Ops`` once, when an engine is loaded. Other
packages can ``register`` backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from shadowkv.ops.attend_coded import selected
from shadowkv.ops.case import Case
from shadowkv.ops.extension import Unbuilt
from shadowkv.ops.references import References
from shadowkv.wording import SettingsError

_REFERENCES = vars(References())
NAMES = tuple(_REFERENCES)
"""All ops."""

FORMS = {name: tuple(field.name for field in fields(op)) for name, op in _REFERENCES.items() if is_dataclass(op)}
"""Forms of ops, for each op whose reference is a dataclass of functions, such as ``DenseAttention``. Each form has its
own backend, whose function has the form's name."""

CALLS = tuple(f"{name}.{form}" if form else name for name in NAMES for form in FORMS.get(name, ("",)))
"""Everything that a backend is chosen for: each op without forms, and each form, such as ``dense_attention.packed``."""

FOLDERS = {
    **dict.fromkeys(("rms_norm", "add_rms_norm", "gated_activation", "quantize_tokens"), "activation_rows"),
    **dict.fromkeys(("add_sinks", "merge_attention"), "partial_attention"),
    **dict.fromkeys(("append_block", "append_tokens", "gather_context", "write_rows"), "copies"),
    **dict.fromkeys(("chunk_mean_scores", "min_max_scores", "find_outliers"), "chunk_scores"),
    **dict.fromkeys(("sort_by_expert", "sum_experts"), "expert_rows"),
    **dict.fromkeys(("causal_convolution", "gated_delta_rule", "ssd"), "linear_attention"),
    **dict.fromkeys(("quantized_matmul", "dequantize_rows"), "quantized_matmul"),
}
"""Folders of small ops that share their files. Every other op has a folder of its own name."""

PREFERENCE = {
    "cuda": (
        *("cuda_sm90", "cuda", "cuda_masked", "cuda_dense", "cuda_fp8", "cuda_mixed_sm90"),
        *("cuda_selected_sm90", "cuda_selected", "fla", "triton", "triton_selected", "humming", "reference"),
    ),
    "cpu": ("cpu", "reference"),
}
"""Backends by device type, fastest first. An op need not have all of these, but it always has ``reference.py``."""

LIBRARIES = {"flashinfer": "flashinfer", "flash-attn": "flash_attn"}
"""Backends that call another package's attention, by their name in ``--attention-backend``. ``FASTER_AT`` in such a
backend's module lists the forms and head dims at which the backend was measured to be faster than this project's
backends. With ``auto``, such a backend is the first choice for these, and is not considered for others."""


@dataclass(frozen=True)
class Outside:
    """A backend from outside the package.

    Attributes:
        module: a module like a backend's file, or only the backend's function.
        device_types: types of devices that the backend runs on.
        preferred: whether the backend is considered before all others. If not, it serves only where an override names
        it.
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
    """Registers a backend from outside the package. Call it before an engine is loaded. Registering the same backend
    again changes nothing.

    Args:
        call: one of ``CALLS``, such as ``rms_norm`` or ``dense_attention.packed``.
        name: the backend's name.
        backend: a function with the signature of the reference, or a module with such a function. In a module, the
            function has the name of the form, or of an op without forms. The module can also have ``supports``,
            ``missing``, ``SYNCHRONISES``, ``NEEDS_LENGTHS`` and ``NOT_IN_GRAPHS``, as files of backends have.
        device_types: ``cpu``, ``cuda`` or both.
        preferred: whether it is considered before all other backends. If not, it serves only where an override names
            it.

    Raises:
        ValueError: there is no such call or device type, or the call has another backend of this name.
        TypeError: ``backend`` is neither a function nor a module with the function.
    """
    op, _, form = call.partition(".")
    if call not in CALLS:
        raise ValueError(f"there is no op {call!r}: the calls are {', '.join(CALLS)}")
    if unknown := [kind for kind in device_types if kind not in PREFERENCE]:
        raise ValueError(f"no ops for devices of type {unknown[0]!r}; use {' or '.join(PREFERENCE)}")
    if not callable(getattr(backend, form or op, None) if isinstance(backend, ModuleType) else backend):
        raise TypeError(f"backend {name!r} of {call} is neither a function nor a module with a function {form or op!r}")
    outside, known = Outside(backend, device_types, preferred), REGISTERED.setdefault(call, {})
    if known.get(name, outside) != outside or _file(op, name) is not None:
        raise ValueError(f"{call} has a backend {name!r} already")
    known[name] = outside


@dataclass(frozen=True)
class Choice:
    """The chosen backend of one of ``CALLS``.

    Attributes:
        backend: the backend's name: that of its file in the op's folder, or the name that it was registered with.
        outside: whether the backend was registered from outside the package.
        function: the backend's function.
        synchronises: whether the function makes the host wait for the device.
        needs_lengths: whether the host must know the lengths of packed sequences.
        not_in_graphs: whether a CUDA graph must not capture the function.
        reasons: faster backends that are not used, and why: ``name: reason``.
        unbuilt: why a faster backend's library cannot be used, if building it, or building it again, would help
            (``Unbuilt``). If there are several such reasons, the first. None if there is none.
    """

    backend: str
    function: Callable[..., Any]
    synchronises: bool
    needs_lengths: bool
    not_in_graphs: bool
    reasons: list[str]
    unbuilt: str | None = None
    outside: bool = False


def choose(
    name: str,
    device: torch.device | str,
    cases: Sequence[Case] = (),
    override: str | None = None,
    attention_backend: str = "auto",
) -> Choice:
    """Chooses a backend for ``name``, one of ``CALLS``: the fastest that runs on ``device`` and supports all ``cases``.
    If ``override`` is given, it names the backend to use. Raises ValueError if no backend can serve.
    ``attention_backend`` is as for ``Ops``."""
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
        faster_at = getattr(module, "FASTER_AT", {}).get(form, ())
        if unasked and not (cases and all(case.head_dim in faster_at for case in cases)):
            continue
        reasons: list[str] = getattr(module, "missing", lambda: [])()
        if unbuilt is None:
            unbuilt = next((reason for reason in reasons if isinstance(reason, Unbuilt)), None)
        if not reasons:
            refuses: Callable[[Case], list[str]] = getattr(module, "supports", lambda case: [])
            reasons = list(dict.fromkeys(reason for case in cases for reason in refuses(case)))
        if not reasons:
            synchronises = getattr(module, "SYNCHRONISES", False)
            needs_lengths = kind == "cuda" and form in getattr(module, "NEEDS_LENGTHS", ())
            not_in_graphs = kind == "cuda" and getattr(module, "NOT_IN_GRAPHS", False)
            limits = (synchronises, needs_lengths, not_in_graphs)
            return Choice(backend, function, *limits, passed_over, unbuilt, backend in outside)
        passed_over.append(f"{backend}: {'; '.join(reasons)}")
    why = f": {'; '.join(passed_over)}" if passed_over else ""
    raise ValueError(f"op {name!r} has no backend {backends[0]!r} here{why}")


def _file(op: str, backend: str) -> ModuleType | None:
    """Imports a backend's file from the op's folder, or returns one of the backends of ``attend_coded.selected``.
    Returns None if there is no backend of this name."""
    if op == "attend_coded" and backend in selected.BACKENDS:
        return selected.EveryChunk(backend)
    path = f"shadowkv.ops.{FOLDERS.get(op, op)}.{backend}"
    return None if find_spec(path) is None else import_module(path)


def _preferred(kind: str, attention_backend: str) -> tuple[str, ...]:
    """Returns the backends for a type of device, in the order in which ``choose`` considers them."""
    if attention_backend == "auto" and kind == "cuda":
        return (*LIBRARIES.values(), *PREFERENCE[kind])
    library = LIBRARIES.get(attention_backend)
    return PREFERENCE[kind] if library is None else (library, *PREFERENCE[kind])


class Ops(References):
    """The ops of an engine, each as an attribute. The model's layers, the cache and the sampler share them.

    Each op has the fastest backend that runs on the device and supports the cases. A backend may define two functions:
    ``missing()`` returns the reasons why it cannot run here, and ``supports(case)`` the reasons why it cannot serve a
    case. The first backend without reasons is chosen. It must then handle the arguments of each call or raise an error.

    Args:
        device: where the ops will run.
        case: the properties of the ops' arguments. None skips ``supports``.
        overrides: maps an op, or a form of an op, to the backend to use, for tests and comparisons.
        attention_backend: one of ``load_settings.ATTENTION_BACKENDS``. ``shadowkv`` uses ``PREFERENCE``. ``auto`` uses
            ``LIBRARIES`` where they are faster, then ``PREFERENCE``. With the name of a library, this library is used
            wherever it can serve, then ``PREFERENCE``.
        others: further cases, for layers with other sizes. The backend of an op must support every case that calls the
            op.

    Attributes:
        called: the entries of ``CALLS`` that a case calls. Without a case, all entries.
        backends: the backend's name for each entry of ``CALLS``.
        overridden: entries of ``CALLS`` whose backend an override names.
        outside: entries of ``called`` whose backend was registered from outside the package.
        reasons: for each entry of ``CALLS``, the faster backends that are not used, and why: ``name: reason``.
        unbuilt: entries of ``called`` that would have a faster backend if a library were built, or built again. Each
            has the reason why the library cannot be used now.
        synchronising: entries of ``called`` that make the host wait for the device. They cannot be captured in a graph.
        needing_lengths: entries of ``called`` for which the host must know the lengths of packed sequences. A graph
            would keep the lengths that it was captured with.
        not_in_graphs: entries of ``called`` that a CUDA graph must not capture. Decode steps do not call them, so
            graphs of decode steps stay possible.

    Raises:
        ValueError: an override names an unknown op. Or it names a backend that the op does not have, or that cannot
            serve.
        SettingsError: the library that ``attention_backend`` names can serve no called op. The message says why.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        case: Case | None = None,
        overrides: Mapping[str, str] | None = None,
        attention_backend: str = "auto",
        others: Sequence[Case] = (),
    ) -> None:
        super().__init__()
        overrides = dict(overrides or {})
        unknown = sorted(set(overrides) - {*NAMES, *CALLS})
        if unknown:
            raise ValueError(f"unknown ops {', '.join(unknown)}; known: {', '.join(NAMES)}")
        cases = others if case is None else (case, *others)
        self.case, self.called = case, frozenset(CALLS)
        if case is not None:
            self.called = case.ops.union(*(other.ops for other in others))
        self.backends: dict[str, str] = {}
        self.overridden: list[str] = []
        self.outside: list[str] = []
        self.reasons: dict[str, list[str]] = {}
        self.unbuilt: dict[str, str] = {}
        self.synchronising: list[str] = []
        self.needing_lengths: list[str] = []
        self.not_in_graphs: list[str] = []
        functions: dict[str, Callable[..., Any]] = {}
        for name in CALLS:
            override = overrides.get(name, overrides.get(name.partition(".")[0]))
            calling = [one for one in cases if name in one.ops]
            choice = choose(name, device, calling, override, attention_backend)
            self.backends[name], self.reasons[name] = choice.backend, choice.reasons
            if override is not None:
                self.overridden.append(name)
            if name in self.called and choice.outside:
                self.outside.append(name)
            if name in self.called and choice.unbuilt is not None:
                self.unbuilt[name] = choice.unbuilt
            if name in self.called and choice.synchronises:
                self.synchronising.append(name)
            if name in self.called and choice.needs_lengths:
                self.needing_lengths.append(name)
            if name in self.called and choice.not_in_graphs:
                self.not_in_graphs.append(name)
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
        why = "; ".join(reasons) or "it has no backend for any op that is called"
        raise SettingsError(f"attention_backend={name!r} can serve no attention here: {why}", ["attention_backend"])
