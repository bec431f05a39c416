"""Numbers and rules that Python shares with C++ or CUDA are the same on both sides."""

import re
from pathlib import Path

import pytest
import torch
from compiled_source import CSRC, compiled

from shadowkv.baselines import shard, vq
from shadowkv.kvcache.sequences.group_layout import MAX_ENTRIES
from shadowkv.ops import sampling
from shadowkv.ops.attend_blocks import cuda_sm90 as attend_blocks
from shadowkv.ops.attend_coded import cuda as attend_coded
from shadowkv.ops.attend_coded import cuda_fp8
from shadowkv.ops.attend_coded import cuda_mixed_sm90 as attend_mixed
from shadowkv.ops.attend_selected import cuda as attend_selected
from shadowkv.ops.attend_selected import cuda_sm90
from shadowkv.ops.codec import STRONG, UNIFORM, CodecId
from shadowkv.ops.fetch_chunks import cuda as fetch_chunks
from shadowkv.ops.page import PAGE
from shadowkv.ops.paged_attention import cuda as paged_attention
from shadowkv.ops.quantized.blocks import BLOCKS
from shadowkv.ops.quantized_matmul.cpu import FORMATS
from shadowkv.ops.select_blocks import cuda_sm90 as select_blocks_cuda
from shadowkv.ops.select_blocks import reference as select_blocks
from shadowkv.ops.select_by_sketch import cuda as select_by_sketch_cuda
from shadowkv.ops.select_by_sketch import reference as select_by_sketch
from shadowkv.ops.select_top_chunks import cuda as select_top_chunks
from shadowkv.ops.sign_scores import cuda as sign_scores_cuda
from shadowkv.ops.sign_scores import reference as sign_scores
from shadowkv.ops.sign_scores.reference import RUN
from shadowkv.ops.sketch_queries import cpu as sketch_queries_cpu
from shadowkv.ops.sketch_queries import cuda as sketch_queries_cuda
from shadowkv.ops.sketch_queries import reference as sketch_queries
from shadowkv.ops.whiten_rows import cuda as whiten_rows

SHARED = {
    "constants.h": {"kPage": PAGE},
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
        "kMostChanceBits": sampling.MAX_BITS,
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
        "kFp8": CodecId.FP8,
        "kKvarn4": CodecId.KVARN_4BIT,
        "kKvarn2": CodecId.KVARN_2BIT,
        "kLatentDense": CodecId.LATENT_DENSE,
        "kLatentInt8": CodecId.LATENT_INT8,
        "kLatentInt4": CodecId.LATENT_INT4,
    },
    "cpu/sketch/sketch.h": {"MAX_PLANE_BYTES": sketch_queries_cpu.MAX_DIMS // 8},
    "kernels/attend_selected/shape.cuh": {
        "kAttendWarps": attend_selected.WARPS,
        "kAttendQueries": attend_selected.QUERIES,
    },
    "kernels/paged_attention/paged_attention.cuh": {"kPagedQueries": paged_attention.QUERIES},
    "kernels/attend_selected/arguments.h": {"kMostGroup": attend_selected.MAX_GROUP},
    "kernels/attend_coded/attend_coded.cuh": {
        "kCodedWarps": (attend_coded.WARPS[True], attend_coded.WARPS[False]),
        "kCodedBlocks": (attend_coded.RESIDENT_BLOCKS[True], attend_coded.RESIDENT_BLOCKS[False]),
    },
    "kernels/attend_coded/codes.cuh": {"kCodedDim": attend_coded.DIM},
    "kernels/attend_coded/queries.cuh": {"kCodedQueries": attend_coded.QUERIES},
    "kernels/attend_latents_sm90/shape.cuh": {
        "kLatentTile": cuda_sm90.TILE,
        "kStrong": STRONG,
        "kLatentConsumers": (4, cuda_sm90.CONSUMERS, 2),
    },
    "kernels/attend_mixed_sm90/shape.cuh": {
        "kMixedDim": attend_mixed.DIM,
        "kSameWidth": shard.GROUP,
        "kVector": vq.GROUP,
        "kEntries": vq.ENTRIES,
        "kConsumers": (attend_mixed.CONSUMERS[True], attend_mixed.CONSUMERS[False]),
        "kQueries": (4, attend_mixed.MAX_GROUP),
    },
    "kernels/common/row_blocks.cuh": {"kBlock": select_blocks.BLOCK},
    "kernels/fetch_chunks/fetch_chunks.cuh": {"kBuckets": fetch_chunks.BUCKETS, "kMostEntries": MAX_ENTRIES},
    "kernels/score_blocks_sm90/score_blocks_sm90.cuh": {
        "kSampled": select_blocks.SAMPLED,
        "kRows": select_blocks_cuda.MAX_ROWS,
    },
    "kernels/select_top_chunks/select_top_chunks.cuh": {"kSelectGroup": select_top_chunks.GROUP},
    "kernels/whiten_rows/whiten_rows.cuh": {
        "kWhitenTile": (whiten_rows.TILE, 8),
        "kWhitenPitch": whiten_rows.PITCH,
        "kWhitenMostRows": whiten_rows.LARGEST,
    },
}
"""By file and name of a constant: Python's number, or Python's numbers in the order of the constant's."""

CHECKED = [
    ("attend_selected/arguments.h", "chunk", attend_selected.CHUNKS),
    ("attend_blocks_sm90/attend_blocks_sm90.cu", "dim", attend_blocks.DIMS),
    ("attend_latents_sm90/binding.h", "dim", cuda_sm90.DIMS),
    ("score_blocks_sm90/score_blocks_sm90.cu", "dim", select_blocks_cuda.DIMS),
    ("common/limits.h", "bytes", sketch_queries_cuda.PLANE_BYTES),
]
"""Bindings, a number of their arguments that they check, and its values that Python supports."""

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
    assert definitions("kernels/paged_attention/paged_rows.cuh", "kBlocks") == blocks
    wide = [tuple(kind.WIDE_BLOCKS[dim] for dim in (64, 96, 128)) for kind in (paged_attention, cuda_fp8)]
    assert definitions("kernels/paged_attention/paged_rows.cuh", "kWideBlocks") == wide


@pytest.mark.parametrize(("binding", "argument", "known"), CHECKED)
def test_a_binding_takes_what_python_says_it_takes(binding: str, argument: str, known: tuple[int, ...]) -> None:
    text = (CSRC / "kernels" / binding).read_text()
    (checked,) = re.findall(rf"STD_TORCH_CHECK\(\s*((?:{argument} == \d+(?: \|\| |,))+)", text)
    assert numbers(checked) == known


def test_paged_attention_has_a_kernel_for_each_head_dim() -> None:
    cases = re.findall(r"\bcase (\d+):", (CSRC / "kernels/paged_attention/binding.h").read_text())
    assert [*map(int, cases)] == [*paged_attention.RESIDENT_BLOCKS] == [*cuda_fp8.RESIDENT_BLOCKS]


def test_latents_for_hopper_have_kernels_for_all_ranks_and_codecs() -> None:
    text = (CSRC / "kernels/attend_latents_sm90/attend_latents_sm90.cu").read_text()
    ((ranks, codecs),) = re.findall(r"AttendLatents<std::integer_sequence<int, ([^>]*)>, ([^>]*)>", text)
    assert numbers(ranks) == cuda_sm90.RANKS
    assert tuple(SHARED["codecs.h"][f"k{name}"] for name in codecs.split(", ")) == UNIFORM


def test_mixed_latents_have_a_kernel_for_each_rank() -> None:
    (ranks,) = re.findall(
        r"integer_sequence<int, (\d[^>]*)>", (CSRC / "kernels/attend_mixed_sm90/attend_mixed_sm90.cu").read_text()
    )
    assert numbers(ranks) == attend_mixed.RANKS


def test_coded_rows_have_kernels_for_the_same_codecs() -> None:
    text = (CSRC / "kernels/attend_coded/attend_coded.cu").read_text()

    def cases(function: str) -> set[int]:
        (body,) = re.findall(rf"\b{function}\([^;{{]*{{\s*switch (.*?)\n *}}\n", text, re.DOTALL)
        return {int(SHARED["codecs.h"][name]) for name in re.findall(r"case codec::(\w+):", body)}

    values = {codec for known in attend_coded.VALUES_OF.values() for codec in known}
    assert cases("of_codecs") == set(attend_coded.VALUES_OF)
    assert cases("of_lloyd") == set(attend_coded.LLOYD)
    assert cases("row_of") == set(attend_coded.VALUES_OF) | values


def test_a_warp_takes_as_many_selected_tokens_as_the_launch_splits_by() -> None:
    (tokens, _) = definitions("kernels/attend_selected/shape.cuh", "kTokens")  # the other is a tile's name for it
    (tiles,) = re.findall(r"\bkWide \? (\d+) : 1\b", (CSRC / "kernels/attend_selected/binding.h").read_text())
    assert tokens == (16,) and 16 * int(tiles) == attend_selected.TILE


def test_a_block_of_sign_scores_walks_no_more_pages_than_it_can_name() -> None:
    assert definitions("kernels/sign_scores/sign_scores.cuh", "kPages") == [(4,)]
    (most,) = definitions("kernels/sign_scores/sign_scores.cuh", "kMaxBlockPages")
    for count in (1, 5, 1000, 10**6):
        assert sign_scores_cuda.block_pages(count, 100) % 4 == 0 < sign_scores_cuda.block_pages(count, 100) <= most[0]


def test_shared_memory_has_room_for_what_kernels_need_besides(tmp_path: Path) -> None:
    """Selections of chunks say what fits beside counts of digits, which the kernels declare."""

    def declared(path: str, name: str) -> str:
        text = (CSRC / "kernels" / path).read_text()
        (found,) = re.findall(rf"^struct {name} {{.*?^}};", text, re.DOTALL | re.MULTILINE)
        return "\n".join([*re.findall(r"^constexpr int .*;", text, re.MULTILINE), found])

    source = tmp_path / "sizes.cpp"
    source.write_text(
        "#include <cstdint>\nstruct uint2 { uint32_t x, y; };\n"
        f"namespace chunks {{ {declared('select_top_chunks/select_top_chunks.cuh', 'SelectShared')} }}\n"
        f"namespace runs {{ {declared('select_by_sketch/radix_select.cuh', 'RadixShared')} }}\n"
        f"namespace runs {{ {declared('select_by_sketch/selections.cuh', 'LargestMemory')} }}\n"
        'extern "C" int of_chunks() { return sizeof(chunks::SelectShared); }\n'
        'extern "C" int of_runs(int groups) {\n'
        "  return sizeof(runs::RadixShared) + 16 + runs::LargestMemory(groups, true, 0).bytes();\n}\n"
    )
    sizes = compiled(source)
    assert 8 * 1024 < sizes.of_chunks() <= select_top_chunks.STATIC_BYTES
    for groups in (1, 2, 3, 4, 5, 1000, 54_001):  # of 8 values, each of which keeps 4 bytes
        assert 8 * 1024 < sizes.of_runs(groups) - 4 * groups <= select_by_sketch_cuda.COUNTS_BYTES


def test_random_numbers_are_the_same_hash() -> None:
    names = ("weighted_sampling", "shape", "selections")
    kernels = "".join((CSRC / f"kernels/select_by_sketch/{name}.cuh").read_text() for name in names)
    factors = set(re.findall(r"0x[\da-f]{8}\b", Path(sampling.__file__).read_text().lower())) - {hex(sampling.WORD)}
    assert len(factors) == 4 and all(factor in kernels for factor in factors)


def test_blocks_of_quantized_numbers_have_the_same_sizes_in_python() -> None:
    text = (CSRC / "cpu/quantized_matmul/quantized_matmul.h").read_text()
    sizes = {name: (int(values), int(bytes_)) for name, values, bytes_ in re.findall(r'"(\w+)", (\d+), (\d+)}', text)}
    assert sizes == {name: (BLOCKS[name].values, BLOCKS[name].bytes) for name in FORMATS}


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
