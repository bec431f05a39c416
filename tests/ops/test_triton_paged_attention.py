"""Paged decode attention in Triton against a softmax per head: on a GPU, or through the interpreter."""

import pytest
import torch
from devices import DEVICE, ON_GPU, TRITON_RUNS
from plain_formulas import check
from ragged_rows import sequences_of
from test_attention_ops import paged_case

if TRITON_RUNS:
    from shadowkv.ops.attend_coded import triton as attend_coded
    from shadowkv.ops.paged_attention import triton

    DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("least_pages", [1, 3, 4])
    @pytest.mark.parametrize(("heads", "group", "dim"), [(4, 8, 512), (1, 16, 512), (2, 3, 320)])
    def test_it_reads_only_the_valid_tokens(
        seed: int, monkeypatch: pytest.MonkeyPatch, heads: int, group: int, dim: int, dtype: torch.dtype,
        least_pages: int,
    ) -> None:  # fmt: skip
        """By five thread blocks, of which some have no tokens, or by one. Ids of unused pages are of no page."""
        monkeypatch.setattr(attend_coded, "MIN_PAGES", least_pages)
        (q, k, v, pages, counts), rows = paged_case(heads, group, dim, dtype)
        pages[counts == 0] = 2**40
        found = triton.paged_attention(*(x.to(DEVICE) for x in (q, k, v, pages, counts)))
        check(tuple(x.cpu() for x in found), rows, dtype)

    def test_tables_may_be_slices_and_rows_may_be_of_one_sequence(seed: int) -> None:
        (q, k, v, pages, counts), rows = paged_case(2, 3, 512, DTYPES[0])
        wide = [torch.nn.functional.pad(x, (0, 3), value=64) for x in (pages, counts)]
        args = (x.to(DEVICE) for x in (q[1:], k, v, *wide))
        q, k, v, pages, counts = args
        found = triton.paged_attention(q, k, v, pages[1:, :5], counts[1:, :5], sequences_of([1, 2, 1], DEVICE))
        check(tuple(x.cpu() for x in found), rows[1:], DTYPES[0])

    def test_rows_without_tokens(seed: int) -> None:
        q, k, v, pages, counts = (x.to(DEVICE) for x in paged_case(2, 3, 512, DTYPES[0])[0])
        for counts_of in (torch.zeros_like(counts), counts[:, :0]):
            out, lse = triton.paged_attention(q, k, v, pages[:, : counts_of.shape[1]], counts_of)
            assert not out.any() and (lse == float("-inf")).all()

    @pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
    def test_captured_in_a_graph_it_gives_the_same_bits(seed: int) -> None:
        q, k, v, pages, counts = (x.to(DEVICE) for x in paged_case(4, 8, 512, torch.bfloat16)[0])
        fewer = torch.randint(65, counts.shape, device=DEVICE).minimum(counts)
        triton.paged_attention(q, k, v, pages, counts)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = triton.paged_attention(q, k, v, pages, counts)
        for own in (counts.clone(), fewer):
            counts.copy_(own)
            graph.replay()
            for found, expected in zip(captured, triton.paged_attention(q, k, v, pages, counts), strict=True):
                assert torch.equal(found, expected)
