"""Arguments beyond what CUDA kernels address or launch are refused, with the value and the limit. The checks of the
bindings are compiled for a CPU."""

import ctypes
from pathlib import Path

import pytest
import torch
from compiled_source import compiled

SOURCE = """
#include "kernels/common/limits.h"

#include <cstring>
#include <exception>

// Writes what the check says to `error`, or nothing.
template <class Check>
void run(char* error, const Check& check) {
  error[0] = 0;
  try {
    check();
  } catch (const std::exception& thrown) {
    std::strncpy(error, thrown.what(), 999);
  }
}

extern "C" void blocks(int64_t count, char* error) {
  run(error, [&] { shadowkv::check_blocks(count, "sequences"); });
}
extern "C" void aligned(int64_t place, int64_t bytes, char* error) {
  run(error, [&] { shadowkv::check_aligned(place, "scores", bytes); });
}
extern "C" void reach(int64_t pages, int64_t bytes_apart, char* error) {
  run(error, [&] { shadowkv::check_reach(pages, bytes_apart, "latents"); });
}
"""
BLOCKS, REACH = 65535, 128 * 2**30
"""Blocks of a grid along an axis, and bytes of a layer."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = tmp_path_factory.mktemp("limits") / "limits.cpp"
    source.write_text(SOURCE)
    return compiled(source, "-isystem", f"{Path(torch.__file__).parent}/include")


def error_of(library: ctypes.CDLL, check: str, *numbers: int) -> str:
    error = ctypes.create_string_buffer(1000)
    getattr(library, check)(*map(ctypes.c_int64, numbers), error)
    return error.value.decode()


def test_more_sequences_than_a_grid_has_rows_are_refused(library):
    assert not error_of(library, "blocks", BLOCKS)
    assert f"{BLOCKS + 1} sequences are more than {BLOCKS}" in error_of(library, "blocks", BLOCKS + 1)


def test_places_that_vector_loads_cannot_read_are_refused(library):
    assert not error_of(library, "aligned", 0x7F0000000010, 16)
    for address, aligned_to in ((0x7F0000000018, 8), (0x7F0000000002, 2), (0x7F0000000001, 1)):
        assert f"scores is aligned to {aligned_to} bytes, not to 16" in error_of(library, "aligned", address, 16)
    start, apart = 0x7F0000000100, 260
    assert "scores is aligned to 4 bytes, not to 16" in error_of(library, "aligned", start | apart, 16)


def test_layers_beyond_the_reach_of_offsets_are_refused(library):
    """Offsets are whole numbers of 32 bytes in 32 bits: those of the page after the last would begin again at 0."""
    granule = 256
    assert REACH // 32 == 2**32
    assert not error_of(library, "reach", REACH // granule, granule)
    told = error_of(library, "reach", REACH // granule + 1, granule)
    assert f"latents spans {REACH + granule} bytes of a layer, more than {REACH} (128 GiB)" in told
