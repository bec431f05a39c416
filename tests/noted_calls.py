"""Which ops are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shadowkv.ops.registry import FORMS, NAMES, Ops


def noted_calls(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Those of ``registry.CALLS`` that are called from now on."""
    called = set[str]()

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: (called.add(name), function(*args, **options))[1]

    for name in NAMES:
        op = getattr(ops, name)
        forms = {form: noting(f"{name}.{form}", getattr(op, form)) for form in FORMS.get(name, ())}
        monkeypatch.setattr(ops, name, replace(op, **forms) if forms else noting(name, op))
    return called
