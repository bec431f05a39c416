"""Models whose experts are packed for a GPU's products, with the library's contract in PyTorch in its place: outputs
are those of the numbers, whole and on ranks; and which weights stay in their form."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import build
from precision import assert_close_like_lowp, draws
from quantized_files import write_quantized
from test_experts import WIDE
from test_gpt_oss import write_mxfp4
from thread_group import on_ranks

from shadowkv.layers.group import ALONE, Group
from shadowkv.layers.moe import RoutedExperts
from shadowkv.layers.quantized_matrix import QuantizedMatrix
from shadowkv.models import load_config, load_model, storage
from shadowkv.ops.quantized.groups import GroupForm
from shadowkv.ops.quantized_matmul import humming
from shadowkv.ops.registry import Ops
from tests.fake_humming import installed

CUDA, BF16 = torch.device("cuda"), torch.bfloat16


def files_of(kind: str, case: str, folder: Path) -> Path:
    return write_mxfp4(folder)[0] if case == "gpt_oss" else write_quantized(folder, kind, case, **WIDE)[0]


def experts_of(path: Path, group: Group, expert_parallel: bool, pack: bool, dtype: str = "bfloat16") -> RoutedExperts:
    """Those of the second layer."""
    model = load_model(path, dtype=dtype, group=group, expert_parallel=expert_parallel).model
    if pack:
        model.pack()
        assert "grouped_matmul" not in model.called_ops and "grouped_quantized_matmul" in model.called_ops
    model.use(Ops())
    experts = model.layers[1].mlp.experts
    for projection in (experts.gate_up, experts.down):
        weight = projection.weight
        assert isinstance(weight, QuantizedMatrix)
        assert isinstance(weight.of_experts, humming.PackedExperts) == pack == (not len(weight.parts))
        assert not isinstance(weight.of_experts, humming.PackedExperts) or weight.of_experts.total_experts == 8
    return experts


@pytest.mark.skipif(find_spec("humming") is not None, reason="the library is here: test_cuda_quantized_models.py")
@pytest.mark.parametrize(
    ("kind", "case"),
    [("awq", "qwen3_moe"), ("nvfp4", "glm4_moe"), ("fp8, Qwen3's blocks", "qwen3_moe"), ("mxfp4", "gpt_oss")],
)
def test_outputs_are_those_of_experts_that_are_not_packed(kind: str, case: str, tmp_path: Path) -> None:
    """Whole, and added up from ranks that have a part of each expert's width, or some of them. gpt-oss's have biases,
    and sizes that are padded."""
    path = files_of(kind, case, tmp_path)
    plain = experts_of(path, ALONE, False, False)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, plain.down.out_features, generator=generator).bfloat16()
    scores = torch.rand(40, 8, generator=generator)
    scores[:, 5] = 0  # no token's
    weights, experts = scores.topk(3)
    exact = experts_of(path, ALONE, False, False, "float32")(x.float(), weights, experts).double()
    expected = draws(lambda: plain(x, weights, experts), torch.finfo(BF16).eps)

    def near(found: torch.Tensor) -> None:
        assert_close_like_lowp(found, exact, *expected)

    with installed():
        whole = experts_of(path, ALONE, False, True)
        near(whole(x, weights, experts))
        near(torch.cat([whole(x[row], weights[row], experts[row]) for row in torch.arange(40).split(1)]))
        for expert_parallel in (False, True):

            def part(group: Group, apart: bool = expert_parallel) -> torch.Tensor:
                return experts_of(path, group, apart, True)(x, weights, experts)

            first, second = on_ranks(2, part)
            near(first + second)


INT4, INT8 = GroupForm("int4", 128, torch.float16), GroupForm("int8", None, torch.bfloat16)
SMALL = GroupForm("int4", 8, torch.float16)
SIDES = ("gate_proj", "up_proj", "down_proj")


def test_experts_stay_as_they_are_where_all_of_a_projection_have_one_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("qwen3_moe", tmp_path)
    config = load_config(tmp_path)
    experts = [f"model.layers.1.mlp.experts.{number}" for number in range(8)]
    forms = {f"{expert}.{side}.weight": INT4 for expert in experts for side in SIDES}
    query = {"model.layers.1.self_attn.q_proj.weight": INT4}
    monkeypatch.setattr(storage, "choose", lambda *_: SimpleNamespace(backend="humming"))
    monkeypatch.setattr(humming, "missing", lambda: [])

    def kept(changed: dict[str, GroupForm | None], quantization: str | None = None) -> set[str]:
        wanted = {name: form for name, form in (forms | query | changed).items() if form is not None}
        return {*storage.kept(wanted, replace(config, quantization=quantization), BF16, CUDA)}

    down = {f"{expert}.down_proj.weight" for expert in experts}
    gate_up = forms.keys() - down
    assert kept({}) == {*forms, *query}
    assert kept({}, "fp8") == {*forms}  # with 8-bit arithmetic for others
    assert kept({f"{experts[3]}.up_proj.weight": INT8}) == down | query.keys()
    assert kept({f"{experts[7]}.down_proj.weight": None}) == gate_up | query.keys()
    assert kept(dict.fromkeys(down, INT8)) == {*forms, *query}
    assert kept(dict.fromkeys(down, SMALL)) == gate_up | query.keys()
    shapes = dict.fromkeys(forms, (64, 128))
    assert storage.dequantized({f"{experts[3]}.up_proj.weight": INT4}, shapes, BF16, CUDA, "fp8") == [
        "1 weight in int4-g128 are dequantized to bfloat16, 0.00 GiB instead of 0.00: experts stay quantized only if "
        "all experts of a projection have the same form"
    ]
    assert storage.dequantized({f"{experts[3]}.up_proj.weight": SMALL}, shapes, BF16, CUDA, None) == [
        "1 weight in int4-g8 are dequantized to bfloat16, 0.00 GiB instead of 0.00: on cuda there is no matrix product "
        "for this form"
    ]
