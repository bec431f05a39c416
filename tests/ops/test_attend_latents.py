"""Attention over all tokens of low-rank keys against attention to all tokens as selected ones."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from devices import INTERPRETED, ON_GPU, TRITON_RUNS
from selected_case import PAGES, Case, learned, there

from shadowkv.kvcache.codecs import ROW_CODECS
from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.attend_coded import reference
from shadowkv.ops.attend_coded.selected import EveryChunk, every_chunk
from shadowkv.ops.attend_selected import reference as attend_selected
from shadowkv.ops.attend_selected.sources import CodedRows, LatentKeys
from shadowkv.ops.page import PAGE

BACKENDS: list[ModuleType] = [reference]
cpu, cuda_selected = EveryChunk("cpu"), EveryChunk("cuda_selected")
if TRITON_RUNS:
    BACKENDS.append(EveryChunk("triton_selected"))
if ON_GPU and not cuda_selected.missing():
    BACKENDS.append(cuda_selected)
if not cpu.missing() and not INTERPRETED:
    BACKENDS.append(cpu)

FIRST, BEGIN, END = torch.tensor([[PAGE * (PAGES - 1), 0, 0], [8, 0, 24], [PAGE, PAGE * PAGES, 24]])
"""First positions, begins and ends of rows. The last row has no tokens. The first starts late, and its page table is as
wide as that of the longest row."""


def case_of(keys: str, values: str, dtype: torch.dtype) -> Case:
    coded = values == "vq-4x256"
    case = Case(
        batch=3, keys=keys, values="2" if coded else values, rank=64, group=2, dtype=dtype, least=PAGE * PAGES // 8
    )
    if coded:
        assert isinstance(case.values, CodedRows)
        case.values = learned(case, replace(case.values, codec=ROW_CODECS[values]))
    assert isinstance(case.keys, LatentKeys)
    rotary = RotaryTables(case.keys.rotary.config, 2 * PAGE * PAGES)
    case.keys = replace(case.keys, first=FIRST, rotary=rotary)
    return case


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda x: x.__name__.rpartition(".")[2])
@pytest.mark.parametrize(
    ("keys", "values"), [("low-rank-int4", "3"), ("low-rank-mixed", "vq-4x256"), ("low-rank", "rows")]
)
def test_every_token_counts(backend: ModuleType, keys: str, values: str, seed: int) -> None:
    """Positions may end where rows do; the basis of mixed latents is in 8 bits."""
    if backend in (cpu, cuda_selected) and keys == "low-rank-mixed":
        pytest.skip("not one of the backend's formats")
    dtype = torch.bfloat16 if backend is cuda_selected else torch.float32
    case = case_of(keys, values, dtype)
    assert isinstance(case.keys, LatentKeys)
    if keys == "low-rank-mixed":
        step = case.keys.basis.abs().amax((2, 3)) / 127
        whole = (case.keys.basis / step[..., None, None]).round().nan_to_num().to(torch.int8)
        case.keys = replace(case.keys, basis=whole, basis_step=step)
    chunks = torch.arange(PAGE * PAGES // case.chunk)
    some = (chunks >= BEGIN[:, None] // case.chunk) & (chunks < END[:, None] // case.chunk)
    case.selected = chunks.masked_fill(~some, -1).unsqueeze(1).expand(-1, case.heads, -1)
    wanted = attend_selected.attend_selected(case.q.float(), case.keys, case.values, case.selected)
    if backend is cuda_selected and isinstance(case.values, CodedRows):  # it looks for scales in the keys' pages
        scale = torch.full_like(case.values.scale, torch.nan)
        scale[case.keys.pages] = case.values.scale[case.values.scale_pages]
        case.values = replace(case.values, scale=scale, scale_pages=case.keys.pages)
    ending = replace(case.keys, rotary=RotaryTables(case.keys.rotary.config, int((FIRST + END).max())))
    device = "cuda" if backend in BACKENDS[1:] and ON_GPU and backend is not cpu else "cpu"
    out, lse = backend.attend_coded(*there((case.q, ending, case.values, BEGIN, END), device))
    error = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu().float(), wanted[0].float(), atol=error, rtol=error)
    torch.testing.assert_close(lse.cpu(), wanted[1], atol=error, rtol=error)
    assert (out[2] == 0).all()
    assert (lse[2] == -torch.inf).all()


def test_rows_within_chunks_are_refused(seed: int) -> None:
    keys = case_of("low-rank-int4", "3", torch.float32).keys
    for name, begin, end in (("begin", BEGIN + 4, END), ("end", BEGIN, END - 1)):
        with pytest.raises(ValueError, match=rf"{name} \[.*\] are not multiples of the chunk size 8"):
            every_chunk(keys, begin, end)
