"""Attention over selected tokens from latents in Triton against the reference: on a GPU, or through the interpreter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from devices import DEVICE, ON_GPU, TRITON_RUNS
from selected_case import Case, learned, there

from shadowkv.kvcache.codecs import ROW_CODECS
from shadowkv.ops.attend_selected import reference
from shadowkv.ops.attend_selected.sources import CodedRows

if TRITON_RUNS:
    from shadowkv.ops.attend_coded import triton as attend_coded
    from shadowkv.ops.attend_selected import triton

    @pytest.mark.parametrize(
        ("form", "codec"),
        [
            ({"keys": "low-rank", "values": "rows", "dim": 80}, None),
            ({"keys": "low-rank-int8", "values": "3", "sampled": True, "chunk": 1, "rank": 40}, "lloyd-3bit"),
            ({"keys": "low-rank-int4", "values": "2", "rope": {"rotary_dim": 32, "interleaved": True}}, None),
            ({"keys": "low-rank-int4", "values": "rows", "dim": 48, "rope": {"rotary_dim": 24}}, None),
            ({"keys": "low-rank-mixed", "values": "4", "sampled": True, "chunk": 1, "rank": 44}, None),
            ({"keys": "low-rank-mixed", "values": "3", "chunk": 4, "group": 8}, "lloyd-3bit"),
            ({"keys": "low-rank-mixed", "values": "2", "rank": 44}, "vq-4x256"),
        ],
    )
    def test_it_is_the_reference(
        form: dict[str, Any], codec: str | None, monkeypatch: pytest.MonkeyPatch, seed: int
    ) -> None:
        """Of a row that selects nothing, too, and shared by several thread blocks."""
        monkeypatch.setattr(attend_coded, "MIN_PAGES", 1)
        case = Case(batch=3, **form)
        case.selected[1] = -1
        if codec is not None:  # whose codes lie alike
            assert isinstance(case.values, CodedRows)
            case.values = replace(case.values, codec=ROW_CODECS[codec])
        if codec == "vq-4x256":
            case.values = learned(case, case.values)
        wanted = case.exact()
        found = triton.attend_selected(*there(case.arguments, DEVICE))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.cpu().double(), other.double(), atol=5e-5, rtol=1e-4)
        if not ON_GPU:
            return
        q = there(case.q, DEVICE).bfloat16()
        found, exact, low = (
            op.attend_selected(x, *there(case.arguments[1:], DEVICE))[0].double()
            for op, x in ((triton, q), (reference, q.float()), (reference, q))
        )
        assert (found - exact).norm() <= 2 * (low - exact).norm()

    def test_other_sources_are_refused() -> None:
        for form in ({"keys": "rows"}, {"keys": "low-rank", "buffered": True}):
            with pytest.raises(ValueError, match="takes latents, and values outside a buffer, not"):
                triton.attend_selected(*Case(**form).arguments)

    def test_codes_of_whole_pages_are_refused() -> None:
        case = Case(keys="low-rank", values="2")
        assert isinstance(case.values, CodedRows)
        case.values = replace(case.values, codec=ROW_CODECS["kvarn-2bit"])
        with pytest.raises(ValueError, match=r"does not know codec 'kvarn-2bit' \(15\)"):
            triton.attend_selected(*case.arguments)

    @pytest.mark.parametrize(
        "rope",
        [
            {"scaling": "proportional", "proportion": 0.25},
            {"scaling": "proportional", "proportion": 0.25, "interleaved": True},
            {"rotary_dim": 64, "scaling": "proportional", "proportion": 0.5},
            {"rotary_dim": 96},
        ],
        ids=str,
    )
    @pytest.mark.parametrize(
        "form",
        [
            {"keys": "low-rank-int4", "values": "3", "sampled": True, "chunk": 1, "rank": 72, "dim": 512, "group": 8},
            {"keys": "low-rank", "values": "rows", "dim": 320},
            {"keys": "low-rank-mixed", "values": "4", "rank": 44, "dim": 512},
        ],
        ids=str,
    )
    def test_of_wide_heads_only_dimensions_that_rotate_are_rebuilt(
        form: dict[str, Any], rope: dict[str, Any], monkeypatch: pytest.MonkeyPatch, seed: int
    ) -> None:
        monkeypatch.setattr(attend_coded, "MIN_PAGES", 1)
        case = Case(batch=2, heads=2, rope=rope, dtype=torch.bfloat16 if ON_GPU else torch.float32, **form)
        wanted, arguments = case.exact(), there(case.arguments, DEVICE)
        found = triton.attend_selected(*arguments)
        if not ON_GPU:
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one.double(), other.double(), atol=5e-5, rtol=1e-4)
            return
        low = reference.attend_selected(*arguments)
        for one, other, rounded in zip(found, wanted, low, strict=True):
            some = other.isfinite()
            errors = [(x.cpu().double() - other)[some].norm() for x in (one, rounded)]
            assert errors[0] <= 2 * errors[1]
