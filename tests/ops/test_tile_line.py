"""How tiles are distributed over the blocks of attention from latents on Hopper, compiled for a CPU."""

import ctypes
from itertools import pairwise

import pytest
from compiled_source import compiled


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = tmp_path_factory.mktemp("line") / "line.cpp"
    source.write_text(
        "#define __device__\n"
        '#include "kernels/attend_latents_sm90/tile_line.cuh"\n'
        "using shadowkv::TileLine;\n"
        'extern "C" int begin(int tiles, int blocks, int block) { return TileLine(tiles, blocks).begin(block); }\n'
        'extern "C" int block_of(int tiles, int blocks, int tile) { return TileLine(tiles, blocks).block_of(tile); }\n'
    )
    return compiled(source)


@pytest.mark.parametrize("blocks", [1, 2, 5, 21, 132])
@pytest.mark.parametrize("tiles", [1, 2, 15, 16, 21, 50, 131, 132, 133, 1000])
def test_every_block_between_two_tiles_has_tiles(line: ctypes.CDLL, tiles: int, blocks: int) -> None:
    """The merge reads what all blocks from a unit's first to its last have left, and a block without tiles leaves
    nothing. There are fewer tiles than blocks where few sequences of a batch are compressed."""
    begins = [line.begin(tiles, blocks, block) for block in range(blocks + 1)]
    assert begins[0] == 0 and begins[-1] == tiles
    lengths = [end - begin for begin, end in pairwise(begins)]
    assert max(lengths) - min(lengths) <= 1
    owners = [line.block_of(tiles, blocks, tile) for tile in range(tiles)]
    assert owners == [block for block, length in enumerate(lengths) for _ in range(length)]
    assert sorted(set(owners)) == list(range(owners[0], owners[-1] + 1))


def test_without_tiles_no_block_has_any(line: ctypes.CDLL) -> None:
    assert [line.begin(0, 5, block) for block in range(6)] == [0] * 6
