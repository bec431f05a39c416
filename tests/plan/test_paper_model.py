"""The paper's printed figures come out of its formulas, and the one misprint is where we say it is."""

import pytest
from paper_model import (
    A100_DEVICE_GBS,
    A100_HOST_GBS,
    PaperSetting,
    equivalent_bandwidth,
    memory_saving,
    memory_saving_as_printed,
)

EXAMPLE = PaperSetting(context=131072, chunk=8, selected=256, outliers=48, rank=160, kv_dim=1024)


def test_equivalent_bandwidth_of_the_papers_example() -> None:
    # Section 4.2 prints 7.2 TB/s, 3.6 x the A100's.
    found = equivalent_bandwidth(EXAMPLE, 0.6, A100_DEVICE_GBS, A100_HOST_GBS) / 1000
    assert round(found, 2) == 7.16
    assert round(found, 1) == 7.2
    assert round(found / 2, 1) == 3.6


def test_equivalent_bandwidth_without_a_fetch_is_bounded_by_the_device() -> None:
    all_hit = equivalent_bandwidth(EXAMPLE, 1.0, A100_DEVICE_GBS, A100_HOST_GBS)
    assert all_hit == pytest.approx(A100_DEVICE_GBS * 2 * 131072 / (131072 / 8 + 2 * (256 + 48) * 8))


def test_memory_saving_of_the_papers_example() -> None:
    # Appendix A.2 prints 7.08: its term 2 (K + O) C is in vectors, the others in elements; times M it is 6.26.
    assert round(memory_saving_as_printed(EXAMPLE), 2) == 7.08
    assert round(memory_saving(EXAMPLE), 2) == 6.26
