"""FlashInfer and flash-attn on a GPU against the reference in float64."""

import os

import library_checks
import pytest
import torch
from precision import assert_close_like_lowp
from test_dense_attention import doubles, packed

from shadowkv.ops.dense_attention import flash_attn, flashinfer, reference

LIBRARIES = [library for library in (flashinfer, flash_attn) if not library.missing()]
if not LIBRARIES:
    pytest.skip("; ".join(flashinfer.missing() + flash_attn.missing()), allow_module_level=True)

DIMS = [int(dim) for dim in os.environ.get("ATTENTION_DIMS", "64,128,256").split(",")]
"""FlashInfer compiles for each, which takes minutes."""
DTYPES = [torch.bfloat16, torch.float16] if os.environ.get("ATTENTION_DTYPES") != "bfloat16" else [torch.bfloat16]
SHAPES = [(heads, group, dim) for dim in DIMS for heads, group in ((3, 1), (2, 4), (1, 8), (2, 16))]
SIZES = [(1, 1), (1, 777), (64, 64), (37, 300), (300, 300), (5, 5000), (700, 1500)]
"""Queries, and keys up to the last of them."""

library = pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.__name__.rpartition(".")[2])
shapes = pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)
sizes = pytest.mark.parametrize(("n", "m"), SIZES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@library
@shapes
@sizes
@dtypes
@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_and_their_sums(seed, library, heads, group, dim, n, m, dtype, is_causal):
    assert_close_like_lowp(
        *library_checks.partial(library, *library_checks.drawn(n, m, heads, group, dim, dtype, "cuda"), is_causal)
    )


@library
@shapes
@sizes
@dtypes
def test_causal_queries_are_the_last(seed, library, heads, group, dim, n, m, dtype):
    library_checks.causal(library, *library_checks.drawn(n, m, heads, group, dim, dtype, "cuda"))


@library
@shapes
@sizes
@dtypes
@pytest.mark.parametrize("window", [1, 64, 129, 4096])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_and_sinks(seed, library, heads, group, dim, n, m, dtype, window, with_sinks):
    library_checks.windowed(library, library_checks.drawn(n, m, heads, group, dim, dtype, "cuda"), window, with_sinks)


@library
@shapes
@dtypes
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [7, 1, 64, 65], [1500, 2, 700, 1024], [40] * 70], ids=str)
def test_packed_sequences_see_themselves_alone(seed, library, heads, group, dim, dtype, lengths):
    *args, pack = packed(lengths, heads, group, dim, dtype)
    for _ in range(2):  # planned, and as planned
        library_checks.packed(library, args, pack)


@library
def test_packs_take_turns(seed, library):
    """More of them than plans are kept, all launched before any is waited for."""
    packs = [packed([100 + count, 900, 3 * count + 1], 2, 4, 128, torch.bfloat16) for count in range(12)]
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(8):
        busy @ busy
    outs = [library.packed(*args) for _ in range(2) for args in packs]
    for out, (*args, pack) in zip(outs, 2 * packs):
        assert_close_like_lowp(out, reference.packed(*doubles(*args), pack), reference.packed(*args, pack))


@library
def test_no_packed_sequences(library):
    library_checks.no_packed_sequences(library, "cuda")


@library
@pytest.mark.parametrize("name", ["partial", "causal"])
@pytest.mark.parametrize(("n", "m"), [(1, 777), (300, 300), (700, 1500)])
def test_captured_in_a_graph_they_read_what_is_there(seed, library, name, n, m):
    """As the pass of a prompt that stays exact is; and the host does not wait."""

    def run(q, k, v):
        return library.causal(q, k, v) if name == "causal" else library.partial(q, k, v, False)[0]

    args = library_checks.drawn(n, m, 2, 4, 128, torch.bfloat16, "cuda")
    run(*args)  # compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*args)
    for _ in range(2):
        for x, new in zip(args, library_checks.drawn(n, m, 2, 4, 128, torch.bfloat16, "cuda")):
            x.copy_(new)
        graph.replay()
        assert torch.equal(captured, run(*args))
