"""Numbers and rules that Python has and C++ or CUDA have too are the same on both sides."""

import re
from pathlib import Path

import pytest
import torch
from compiled_source import CSRC, compiled

from shadowkv.kvcache.codecs import vectors
from shadowkv.kvcache.layout import MOST_ENTRIES
from shadowkv.kvcache.parts import bit_allocation
from shadowkv.ops import sampling
from shadowkv.ops.attend_coded import cuda as attend_coded
from shadowkv.ops.attend_coded import cuda_fp8
from shadowkv.ops.attend_coded import cuda_mixed as attend_mixed
from shadowkv.ops.attend_selected import cuda as attend_selected
from shadowkv.ops.attend_selected import cuda_sm90
from shadowkv.ops.codec import STRONG, CodecId
from shadowkv.ops.dequantise_blocks.reference import FORMATS
from shadowkv.ops.fetch_chunks import cuda as fetch_chunks
from shadowkv.ops.page import PAGE
from shadowkv.ops.paged_attention import cuda as paged_attention
from shadowkv.ops.select_blocks import cuda as select_blocks_cuda
from shadowkv.ops.select_blocks import reference as select_blocks
from shadowkv.ops.select_by_sketch import reference as select_by_sketch
from shadowkv.ops.select_top_chunks import cuda as select_top_chunks
from shadowkv.ops.sign_scores import cpu as sign_scores_cpu
from shadowkv.ops.sign_scores import reference as sign_scores
from shadowkv.ops.sign_scores.reference import RUN
from shadowkv.ops.sketch_queries import cuda as sketch_queries_cuda
from shadowkv.ops.sketch_queries import reference as sketch_queries
from shadowkv.ops.whiten_rows import cuda as whiten_rows

SHARED = {
    "page.h": {"kPage": PAGE},
    "sketch_rules.h": {
        "kMostQueries": sketch_queries_cuda.GROUP,
        "kQueryPlanes": sketch_queries.PLANES,
        "kRun": RUN,
        "kScaleShift": sign_scores.SCALE_SHIFT,
        "kExcluded": sign_scores.EXCLUDED_SCALE,
        "kKeptShare": select_by_sketch.KEPT_SHARE,
        "kKeptFactor": select_by_sketch.KEPT_OVER_BUDGET,
        "kKeptLeast": select_by_sketch.KEPT_LEAST,
        "kSampledShare": select_by_sketch.SAMPLED_SHARE,
        "kMostChanceBits": sampling.MOST_BITS,
        "kCaution": sampling.CAUTION,
    },
    "codecs.h": {
        "kDense": CodecId.DENSE,
        "kRotated4": CodecId.ROTATED_4BIT,
        "kRotated3": CodecId.ROTATED_3BIT,
        "kRotated2": CodecId.ROTATED_2BIT,
        "kLloyd8": CodecId.LLOYD_8BIT,
        "kLloyd4": CodecId.LLOYD_4BIT,
        "kLloyd3": CodecId.LLOYD_3BIT,
        "kLloyd2": CodecId.LLOYD_2BIT,
        "kPolarInt4": CodecId.POLAR_INT4,
        "kTq3": CodecId.TQ3_0,
        "kKvarn4": CodecId.KVARN_4BIT,
        "kKvarn2": CodecId.KVARN_2BIT,
        "kLatentDense": CodecId.LATENT_DENSE,
        "kLatentInt8": CodecId.LATENT_INT8,
        "kLatentInt4": CodecId.LATENT_INT4,
    },
    "cpu/sketch.h": {"MOST_PLANE_BYTES": sign_scores_cpu.MOST_DIMS // 8},
    "kernels/attend/shape.cuh": {
        "kAttendWarps": attend_selected.WARPS,
        "kAttendQueries": attend_selected.MAX_GROUP,
    },
    "kernels/attend_coded.cuh": {
        "kCodedWarps": (attend_coded.WARPS[True], attend_coded.WARPS[False]),
        "kCodedBlocks": (attend_coded.RESIDENT_BLOCKS[True], attend_coded.RESIDENT_BLOCKS[False]),
    },
    "kernels/attend_coded/codes.cuh": {"kCodedDim": attend_coded.DIM},
    "kernels/attend_coded/queries.cuh": {"kCodedQueries": attend_coded.QUERIES},
    "kernels/attend_latents_sm90/shape.cuh": {
        "kLatentTile": cuda_sm90.TILE,
        "kStrong": STRONG,
        "kLatentConsumers": (cuda_sm90.CONSUMERS, 2),
    },
    "kernels/attend_mixed_sm90/shape.cuh": {
        "kMixedDim": attend_mixed.DIM,
        "kSameWidth": bit_allocation.GROUP,
        "kVector": vectors.GROUP,
        "kEntries": vectors.ENTRIES,
        "kConsumers": (attend_mixed.CONSUMERS[True], attend_mixed.CONSUMERS[False]),
    },
    "kernels/block_copies.cuh": {"kBlock": select_blocks.BLOCK},
    "kernels/fetch_chunks.cuh": {"kBuckets": fetch_chunks.BUCKETS, "kMostEntries": MOST_ENTRIES},
    "kernels/score_blocks_sm90/shape.cuh": {
        "kSampled": select_blocks.SAMPLED,
        "kRows": select_blocks_cuda.MOST_ROWS,
    },
    "kernels/select_top_chunks.cuh": {"kSelectGroup": select_top_chunks.GROUP},
    "kernels/whiten_rows.cuh": {
        "kWhitenTile": (whiten_rows.TILE, 8),
        "kWhitenPitch": whiten_rows.PITCH,
        "kWhitenMostRows": whiten_rows.LARGEST,
    },
}
"""By file and name: the number in Python, or several that the definition names in order."""

NUMBER = r"\b(?:0x[\da-f]+|\d+(?:\.\d+)?)"


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(found) if "." in found else int(found, 0) for found in re.findall(NUMBER, text))


def definitions(path: str, name: str) -> list[tuple[float, ...]]:
    """The numbers in each definition of a constant that a source has."""
    found = re.findall(rf"\bconstexpr [^;]*?\b{name}(?:\[\])? = ([^;]+);", (CSRC / path).read_text())
    return [numbers(text) for text in found]


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in SHARED.items() for name in names])
def test_a_constant_is_the_same_in_python(path: str, name: str) -> None:
    expected = SHARED[path][name]
    assert definitions(path, name) == [expected if isinstance(expected, tuple) else (expected,)]


def test_all_codecs_of_kernels_are_known_by_the_same_numbers() -> None:
    assert set(re.findall(r"constexpr int64_t (\w+)", (CSRC / "codecs.h").read_text())) == set(SHARED["codecs.h"])


def test_launches_of_paged_attention_know_how_many_blocks_a_multiprocessor_holds() -> None:
    blocks = [tuple(kind.RESIDENT_BLOCKS[dim] for dim in (64, 96, 128, 256)) for kind in (paged_attention, cuda_fp8)]
    assert definitions("kernels/paged_rows.cuh", "kBlocks") == blocks


def test_latents_of_the_largest_rank_for_hopper_have_a_kernel() -> None:
    (ranks,) = re.findall(r"integer_sequence<int, ([^>]*)>", (CSRC / "bindings/attend_latents_sm90.cu").read_text())
    assert max(numbers(ranks)) == cuda_sm90.MOST_RANK


def test_random_numbers_are_the_same_hash() -> None:
    names = ("weighted_sampling", "select_by_sketch/shape", "select_by_sketch/choose_chunks")
    kernels = "".join((CSRC / f"kernels/{name}.cuh").read_text() for name in names)
    factors = set(re.findall(r"0x[\da-f]{8}\b", Path(sampling.__file__).read_text().lower())) - {hex(sampling.WORD)}
    assert len(factors) == 4 and all(factor in kernels for factor in factors)


def test_blocks_of_quantised_numbers_have_the_same_sizes_in_python() -> None:
    text = (CSRC / "cpu/quantised_matmul.h").read_text()
    sizes = {name: (int(values), int(bytes_)) for name, values, bytes_ in re.findall(r'"(\w+)", (\d+), (\d+)}', text)}
    assert sizes == {name: (form.values, form.bytes) for name, form in FORMATS.items()}


def test_as_many_runs_are_kept_in_all_backends(tmp_path: Path) -> None:
    """Python has the rule once, for references, launches and the C++ backend; CUDA kernels have it in a header."""
    source = tmp_path / "rules.cpp"
    source.write_text(
        '#include "sketch_rules.h"\n'
        'extern "C" int kept(int runs, int tokens) { return shadowkv::kept_runs(runs, tokens); }\n'
    )
    in_kernels = compiled(source).kept
    pages, budget = torch.tensor([0, 1, 47, 48, 49, 767, 768, 769, 777, 900, 54_688]), (1, 3, 95, 191, 192, 193, 1001)
    for chunk in (1, 2, 4, 8):
        for chunks in budget:
            kept = select_by_sketch.kept_runs(pages, torch.tensor(chunks), chunk).tolist()
            runs = (pages * (PAGE // RUN)).tolist()
            assert kept == [in_kernels(count, chunks * chunk) for count in runs]
            assert kept == [select_by_sketch.most_kept(count, chunks, chunk) for count in runs]
        assert not select_by_sketch.kept_runs(pages, torch.tensor(0), chunk).any()
