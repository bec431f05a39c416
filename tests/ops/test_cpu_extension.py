"""Properties of the C++ backends: checks of arguments, threads, instruction sets, and fake implementations."""

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch
from devices import by_threads
from plain_formulas import SHAPES, assert_close, attend_rows, poison
from test_cpu_attend_selected import Case
from torch import Tensor

from shadowkv.ops import extension
from shadowkv.ops.extension import Unbuilt, cpu_missing
from shadowkv.ops.page import PAGE
from shadowkv.ops.paged_attention import cpu
from shadowkv.ops.sampling import MAX_BITS, Sampling
from shadowkv.ops.select_by_sketch import cpu as cpu_selection
from shadowkv.ops.select_by_sketch import reference as reference_selection
from shadowkv.ops.sign_scores import cpu as cpu_scores
from shadowkv.ops.sign_scores import reference as reference_scores
from shadowkv.ops.sign_scores.reference import EXCLUDED_SCALE, encode_scale, pack_sketch
from shadowkv.ops.sketch_queries.reference import plane_bytes, sketch_queries

pytestmark = pytest.mark.skipif(bool(cpu_missing()), reason="the C++ extension is not built")


def case(lengths: list[int], heads: int = 2, group: int = 3, dim: int = 64) -> tuple[Tensor, ...]:
    """Arguments on shuffled pages of a pool, with NaN past the end of every sequence."""
    used = [-(-length // PAGE) for length in lengths]
    page_ids = torch.randperm(sum(used))
    pages, counts = torch.zeros(2, len(lengths), max(used, default=0), dtype=torch.int64)
    valid = torch.zeros(sum(used), PAGE, dtype=torch.bool)
    for row, (length, count) in enumerate(zip(lengths, used)):
        pages[row, :count], page_ids = page_ids[:count], page_ids[count:]
        counts[row, :count] = (length - PAGE * torch.arange(count)).clamp(max=PAGE)
        for page, rows in zip(pages[row, :count], counts[row, :count]):
            valid[page, :rows] = True
    k, v = (poison(torch.randn(len(valid), PAGE, heads, dim), valid).transpose(1, 2) for _ in range(2))
    return torch.randn(len(lengths), heads * group, dim), k, v, pages, counts


def plain(args: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Float64 attention of every row."""
    q, k, v, pages, counts = args
    rows = []
    for query, page_ids, ends in zip(q, pages, counts):
        parts = ([x[page_id, :, :end] for page_id, end in zip(page_ids, ends)] for x in (k, v))
        rows.append((query, *(torch.cat(part, dim=1) for part in parts)))
    return attend_rows(rows)


def refuse(error: type[Exception], match: str, **changes: Tensor) -> None:
    args = dict(zip(("q", "k", "v", "pages", "counts"), case([100, 7])))
    with pytest.raises(error, match=match):
        torch.ops.shadowkv.paged_attention(*(args | changes).values())


def test_the_binding_refuses_a_dtype_by_name():
    refuse(RuntimeError, "q is Half, not Float or BFloat16", q=torch.zeros(2, 6, 64, dtype=torch.float16))
    refuse(RuntimeError, "k is BFloat16, not Float", k=torch.zeros(3, 2, 64, 64, dtype=torch.bfloat16))
    refuse(RuntimeError, "pages is Int, not Long", pages=torch.zeros(2, 2, dtype=torch.int32))


def test_the_binding_refuses_a_shape_by_its_sizes():
    refuse(RuntimeError, r"q has shape \[6, 64\], not 3 dimensions", q=torch.zeros(6, 64))
    refuse(RuntimeError, r"k has shape \[3, 2, 64, 64\], q has shape \[2, 6, 32\]", q=torch.zeros(2, 6, 32))
    refuse(RuntimeError, r"v has shape \[3, 1, 64, 64\]", v=torch.zeros(3, 1, 64, 64))
    refuse(RuntimeError, "7 query heads are no multiple of 2 kv heads", q=torch.zeros(2, 7, 64))
    refuse(RuntimeError, r"pages has shape \[3, 2\], q has shape", pages=torch.zeros(3, 2, dtype=torch.int64))
    refuse(RuntimeError, r"counts \[2, 3\]", counts=torch.zeros(2, 3, dtype=torch.int64))
    refuse(RuntimeError, "the last must be 1", k=torch.zeros(3, 2, 64, 128)[..., ::2])


def test_the_binding_refuses_pages_and_counts_that_lie_outside():
    refuse(IndexError, r"page 3 is not in \[0, 3\)", pages=torch.tensor([[0, 1], [3, 0]]))
    refuse(IndexError, r"page -1 is not in", pages=torch.tensor([[0, 1], [-1, 0]]))
    refuse(IndexError, r"count 65 is not in \[0, 64\]", counts=torch.tensor([[65, 1], [1, 0]]))


@pytest.mark.parametrize("lengths", [[8192], [1, 64, 65, 1000, 513, 512]], ids=["long", "ragged"])
def test_the_number_of_threads_changes_no_bit(seed, lengths):
    args = case(lengths)
    results = by_threads(lambda: cpu.paged_attention(*args))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
    exact = plain(args)
    assert_close(results[0][0], exact[0])
    assert_close(results[0][1], exact[1])


@pytest.mark.parametrize("dim", [1, 3, 20, 72, 80])
@pytest.mark.parametrize("group", [1, 5])
def test_any_dim_and_group(seed, dim, group):
    args = case([1, 130, 63], group=group, dim=dim)
    for found, exact in zip(cpu.paged_attention(*args), plain(args)):
        assert_close(found, exact)


def test_keys_and_values_may_end_at_different_pages(seed):
    q, k, v, pages, counts = case([70])
    longer = torch.cat((k, torch.zeros_like(k[:1])))
    for found, exact in zip(cpu.paged_attention(q, longer, v, pages, counts), plain((q, k, v, pages, counts))):
        assert_close(found, exact)


def test_a_row_without_tokens_is_zero(seed):
    args = case([5, 0, 70])
    out, lse = cpu.paged_attention(*args)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert (lse[1] == -torch.inf).all()
    assert_close(out[[0, 2]], plain(args)[0][[0, 2]])


def test_other_dtypes_are_refused_by_name(seed):
    q, k, v, pages, counts = case([5, 70])
    with pytest.raises(RuntimeError, match="q is Half, not Float or BFloat16"):
        cpu.paged_attention(q.half(), k.half(), v.half(), pages, counts)


def test_a_nan_in_a_query_stays_in_its_head(seed):
    args = case([5, 70])
    args[0][1, 2, 0] = torch.nan
    out, lse = cpu.paged_attention(*args)
    broken = torch.zeros(2, 6, dtype=torch.bool)
    broken[1, 2] = True
    assert torch.equal(out.isnan().all(-1), broken)
    assert torch.equal(out.isnan().any(-1), broken)
    assert torch.equal(lse.isnan(), broken)


def test_an_extension_of_an_older_version_is_told_and_left(monkeypatch):
    def _op_that_came_later() -> None: ...

    monkeypatch.setattr(extension, "_sign_scores", _op_that_came_later)
    [reason] = extension.cpu_missing.__wrapped__()
    assert isinstance(reason, Unbuilt)
    assert reason.endswith("is of an older version and lacks op_that_came_later")


@pytest.mark.parametrize("change", ["edited", "new", "moved"])
def test_an_extension_of_other_sources_is_told_and_left(monkeypatch, tmp_path, change):
    sources = shutil.copytree(Path(__file__).parents[2] / "csrc", tmp_path / "csrc")
    monkeypatch.setattr(extension, "clone", lambda: tmp_path)
    monkeypatch.setattr(extension, "_load", lambda *_: [])
    assert extension.cpu_missing.__wrapped__() == []
    header = sources / "cpu/common/numbers.h"
    if change == "moved":
        header.rename(sources / "numbers.h")
    elif change == "edited":
        header.write_text(header.read_text() + "// another line\n")
    else:
        (sources / "new.h").touch()
    [reason] = extension.cpu_missing.__wrapped__()
    assert isinstance(reason, Unbuilt)
    assert reason == f"{extension.cpu_library().name} was built from sources that have changed since"


def test_an_extension_for_another_torch_is_told_with_what_to_do(monkeypatch, tmp_path):
    (tmp_path / f"_cpu_torch2_13{EXTENSION_SUFFIXES[0]}").touch()
    monkeypatch.setattr(extension, "PACKAGE", tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.99.1")
    [reason] = extension.cpu_missing.__wrapped__()
    assert isinstance(reason, Unbuilt)
    assert reason == (
        "the C++ ops are built for torch 2.13, and this is 2.99.1; pip install 'torch==2.13.*' brings them back"
    )


def test_an_extension_for_another_python_is_told(monkeypatch, tmp_path):
    (tmp_path / "_cpu_torch2_13.cpython-399-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(extension, "PACKAGE", tmp_path)
    assert extension.cpu_missing.__wrapped__() == ["the C++ ops are built for another Python"]


def test_without_an_extension_it_is_not_built(monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "PACKAGE", tmp_path)
    assert extension.cpu_missing.__wrapped__() == ["not built"]


def sketch_case() -> dict[str, Tensor]:
    """Arguments of the ops on a sketch: two rows of two pages, one kv head of three query heads of 64."""
    plane = torch.randint(256, (2, 3, 1, 64, 8), dtype=torch.uint8)
    return {
        "whole": torch.randint(-127, 128, (2, 3, 8, 8), dtype=torch.int8),
        "unit": torch.rand(2, 3),
        "coarse": torch.randn(2, 1, 16).half(),
        "signs": plane[0],
        "rest": plane[1],
        "scale": torch.randint(248, (3, 1, 64), dtype=torch.uint8),
        "pages": torch.tensor([[0, 2], [1, 99]]),
        "num_pages": torch.tensor([2, 1]),
        "counts": torch.tensor([[10, 8], [2, 0], [20, 9], [5, 0]]),
        "length": torch.rand(2, 1),
        "run_sharpness": 0.5,
        "chunk_sharpness": 0.7,
        "random": torch.randint(1 << 32, (2, 2, 1)),
    }


SIGNS = ("whole", "unit", "signs", "scale", "pages", "num_pages")


def test_the_fakes_have_the_shapes_of_the_ops():
    sketch = sketch_case()
    for op, args in (
        (torch.ops.shadowkv.paged_attention, case([5, 70])),
        (torch.ops.shadowkv.sign_scores, tuple(sketch[name] for name in SIGNS)),
        (torch.ops.shadowkv.attend_selected, Case(keys="low-rank-int8", values="3", sampled=True).raw_arguments),
        (torch.ops.shadowkv.select_by_sketch, (*sketch.values(), 2, 25)),
    ):
        torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))


def test_sign_scores_are_those_of_the_reference_to_the_last_bit(seed):
    keys, q = torch.randn(40, 2, 64, 96), torch.randn(3, 10, 96)
    signs, _, scale = pack_sketch(keys)
    scale[7] = torch.arange(128, dtype=torch.uint8).view(2, 64)  # every code
    scale[8] = torch.arange(120, 248, dtype=torch.uint8).view(2, 64)
    maps, states = torch.linalg.qr(torch.randn(1, 2, 96, 96)).Q, torch.zeros(3, dtype=torch.int64)
    places = torch.randint(40, (3, 150)), torch.tensor([150, 0, 101])
    args = sketch_queries(q, maps, states), signs, scale, *places
    assert torch.equal(cpu_scores.sign_scores(*args), reference_scores.sign_scores(*args))


@pytest.mark.parametrize(("dim", "chunk"), [(64, 1), (96, 4), (256, 2)])
def test_selections_are_those_of_the_reference(seed, dim, chunk):
    rows, pages = 16, 180
    arena = torch.randint(256, (pages, 2, 64, 3 * plane_bytes(dim)), dtype=torch.uint8)  # planes of a page lie together
    signs, rest = arena[..., : plane_bytes(dim)], arena[..., plane_bytes(dim) : 2 * plane_bytes(dim)]
    scale = encode_scale(torch.rand(pages, 2, 64) + 0.5)
    scale[3, 1, 8:24] = EXCLUDED_SCALE
    maps, states = torch.linalg.qr(torch.randn(1, 2, dim, dim)).Q, torch.zeros(rows, dtype=torch.int64)
    queries = sketch_queries(3 * torch.randn(rows, 6, dim), maps, states)
    places = torch.stack([torch.randperm(pages) for _ in range(rows)]), torch.randint(pages + 1, (rows,))
    coarse = reference_scores.sign_scores(queries, signs, scale, *places)
    args = queries, coarse, signs, rest, scale, *places, torch.full((rows,), 40), chunk, 80
    counts = torch.randint(41, (rows,))
    for sampling in (None, Sampling(counts, torch.randint(1 << 40, (rows,)))):
        chunks, log_weight = cpu_selection.select_by_sketch(*args, sampling, 5)
        expected, expected_weight = reference_selection.select_by_sketch(*args, sampling, 5)
        same = (chunks == expected).all(-1)
        assert (
            same.float().mean() > 0.8
        )  # what is sampled depends on the last bits of sums, ties are broken as one likes
        assert ((chunks >= 0).sum(-1) - (expected >= 0).sum(-1)).abs().max() <= 1
        if sampling is not None:
            # A chance is a multiple of 2**-20, and may be the next one: the rarer what was sampled, the more that is.
            # In a row or two a score is rounded to the next float16, which changes its chance and, less, the others'.
            error = (log_weight - expected_weight).abs().masked_fill(~same[..., None] | (chunks < 0), 0)
            beyond = error > 1e-4 + 4 * expected_weight.exp() / 2**MAX_BITS
            assert beyond.any(-1).float().mean() < 0.15
            assert error.max() < 0.02


def test_queries_that_are_not_finite_select_something_of_their_own_row_alone(seed):
    pages = 180  # so many that not all runs are examined
    signs, rest = torch.randint(256, (2, pages, 2, 64, 8), dtype=torch.uint8)
    scale = encode_scale(torch.rand(pages, 2, 64) + 0.5)
    places = torch.randperm(pages).expand(3, -1), torch.full((3,), pages)
    q = torch.randn(3, 2, 64)
    q[1, 0, 5], q[1, 1, 7] = torch.nan, torch.inf
    queries = sketch_queries(q, torch.eye(64).expand(1, 2, 64, 64), torch.zeros(3, dtype=torch.int64))
    sampling = Sampling(torch.full((3,), 40), torch.arange(3))
    coarse = cpu_scores.sign_scores(queries, signs, scale, *places)
    args = coarse, signs, rest, scale, *places, torch.full((3,), 40), 1, 80, sampling
    chunks, _ = cpu_selection.select_by_sketch(queries, *args)
    assert (chunks[1] < 64 * pages).all()
    q[1] = 1.0
    finite = sketch_queries(q, torch.eye(64).expand(1, 2, 64, 64), torch.zeros(3, dtype=torch.int64))
    others, _ = cpu_selection.select_by_sketch(finite, cpu_scores.sign_scores(finite, signs, scale, *places), *args[1:])
    assert torch.equal(chunks[[0, 2]], others[[0, 2]])


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (RuntimeError, "whole is Float, not Char", {"whole": torch.zeros(2, 3, 8, 8)}),
        (RuntimeError, r"whole has shape \[2, 3, 8, 16\]", {"whole": torch.zeros(2, 3, 8, 16, dtype=torch.int8)}),
        (RuntimeError, r"unit has shape \[2, 4\]", {"unit": torch.zeros(2, 4)}),
        (RuntimeError, r"signs has shape .*, rest", {"rest": torch.zeros(3, 2, 64, 8, dtype=torch.uint8)}),
        (RuntimeError, r"scale has shape \[3, 2, 64\]", {"scale": torch.zeros(3, 2, 64, dtype=torch.uint8)}),
        (RuntimeError, "scale is Half, not Byte", {"scale": torch.zeros(3, 1, 64).half()}),
        (RuntimeError, r"pages has shape \[1, 2\]", {"pages": torch.zeros(1, 2, dtype=torch.int64)}),
        (RuntimeError, r"coarse has shape \[2, 1, 8\]", {"coarse": torch.zeros(2, 1, 8).half()}),
        (RuntimeError, r"counts has shape \[3, 2\]", {"counts": torch.zeros(3, 2, dtype=torch.int64)}),
        (RuntimeError, r"length has shape \[2, 2\]", {"length": torch.zeros(2, 2)}),
        (RuntimeError, r"random has shape \[2, 2, 2\]", {"random": torch.zeros(2, 2, 2, dtype=torch.int64)}),
        (
            IndexError,
            r"count -1 is not in \[0, 2\*\*30\)",
            {"counts": torch.tensor([[10, -1], [2, 0], [20, 9], [5, 0]])},
        ),
        (IndexError, r"num_pages 3 is not in \[0, 2\]", {"num_pages": torch.tensor([3, 0])}),
        (IndexError, r"page 3 is not in \[0, 3\)", {"pages": torch.tensor([[0, 3], [1, 99]])}),
        (IndexError, r"page -1 is not in", {"pages": torch.tensor([[-1, 0], [1, 99]])}),
    ],
)
def test_the_bindings_of_the_sketch_refuse_what_does_not_fit(error, match, changes):
    args = sketch_case() | changes
    with pytest.raises(error, match=match):
        torch.ops.shadowkv.select_by_sketch(*args.values(), 1, 25)
    if not changes.keys() - set(SIGNS):
        with pytest.raises(error, match=match):
            torch.ops.shadowkv.sign_scores(*(args[name] for name in SIGNS))


def test_the_binding_refuses_a_chunk_that_runs_do_not_hold():
    with pytest.raises(RuntimeError, match="chunks have 1, 2, 4 or 8 tokens, not 3"):
        torch.ops.shadowkv.select_by_sketch(*sketch_case().values(), 3, 25)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx2", "baseline"])
def test_older_instruction_sets(isa):
    """The choice is made when the library loads, so in a process of its own."""
    if torch.ops.shadowkv.cpu_isa() == "baseline":
        pytest.skip("this machine has no other")
    here = Path(__file__).parent
    program = f"""
import sys
sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]
import torch
from plain_formulas import assert_close
import test_causal_convolution as convolution
import test_cpu_attend_selected as selected
import test_cpu_extension as tests
import test_linear_attention as linear
import test_quantized_blocks as quantized
from shadowkv.ops.quantized_matmul.cpu import FORMATS
from shadowkv.ops.linear_attention import cpu as recurring
from shadowkv.ops.registry import Ops
assert torch.ops.shadowkv.cpu_isa() == {isa!r}
torch.manual_seed(0)
for heads, group, dim in {[*SHAPES, (2, 5, 20)]}:
    args = tests.case([1, 130, 63, 600], heads, group, dim)
    exact = tests.plain(args)
    for found, expected in zip(tests.cpu.paged_attention(*args), exact):
        assert_close(found, expected)
    low = tuple(x.bfloat16() if x.is_floating_point() else x for x in args)
    for found, expected in zip(tests.cpu.paged_attention(*low), tests.plain(low)):
        torch.testing.assert_close(found.double(), expected, atol=1e-2, rtol=1e-2)
for dtype in (torch.float32, torch.bfloat16):
    for shape in linear.SHAPES:
        for op in (linear.RULE, linear.SSD):
            op.check(recurring, op.draw((7, 1), *shape, dtype))
    convolution.check(recurring, convolution.draw_convolution((7, 1), 300, 4, dtype))
selected.test_float32_is_the_reference()
selected.test_of_bfloat16_only_the_result_is_rounded()
for form in FORMATS:
    quantized.test_any_bytes_are_what_ggml_makes_of_them(0, Ops(), form)
    quantized.assert_products(Ops(), form, quantized.tokens_of(6, 768), quantized.random_blocks(form, 67, 768))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "SHADOWKV_CPU_ISA": isa}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
