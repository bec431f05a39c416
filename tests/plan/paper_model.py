"""The paper's own model of what ShadowKV saves (Sun et al., arXiv:2410.21465, section 4.2 and appendix A.2).

It counts per layer and sequence, in a K or V vector of all kv heads (M). The planner's figures come from the real
layout instead.
"""

from __future__ import annotations

from dataclasses import dataclass

A100_DEVICE_GBS = 2000.0
"""B_GPU of the paper's example, GB/s."""

A100_HOST_GBS = 31.5
"""B_PCIe of the paper's example, GB/s."""


@dataclass(frozen=True)
class PaperSetting:
    """The paper's symbols; the defaults are its example.

    Attributes:
        context: S, tokens.
        chunk: C, tokens.
        selected: K, chunks per step.
        outliers: O, chunks.
        rank: r.
        kv_dim: M, elements of a K or V vector (H * d).
    """

    context: int = 128 * 1024
    chunk: int = 8
    selected: int = 256
    outliers: int = 48
    rank: int = 160
    kv_dim: int = 1024


def equivalent_bandwidth(
    setting: PaperSetting, hit_rate: float, device_bandwidth: float, host_bandwidth: float
) -> float:
    """Full K and V of the context over the time of one step's attention, in the unit of the bandwidths (section 4.2).

    2 S B_GPU / (S/C + 2 (K + O) C + (1 - alpha) K C B_GPU / B_PCIe): one landmark per chunk, K and V of the selected
    chunks and the outliers, and over PCIe the values that the device does not hold yet. Rebuilding keys runs beside
    the fetch and is not counted. The three terms add up: the paper overlaps neither scoring nor attention with the
    fetch.
    """
    s = setting
    landmarks = s.context / s.chunk
    attention = 2 * (s.selected + s.outliers) * s.chunk
    fetch = (1 - hit_rate) * s.selected * s.chunk * device_bandwidth / host_bandwidth
    return 2 * s.context * device_bandwidth / (landmarks + attention + fetch)


def memory_saving(setting: PaperSetting) -> float:
    """Full K and V over what stays on the device (appendix A.2, with the factor M that its second term lacks).

    2 S M / (S M / C + 2 (K + O) C M + S r + r M): landmarks, K and V of the selected chunks and the outliers, latents,
    basis.
    """
    return _saving(setting, setting.kv_dim)


def memory_saving_as_printed(setting: PaperSetting) -> float:
    """Appendix A.2 to the letter, 2 (K + O) C without M: it counts tokens of M elements as one element each."""
    return _saving(setting, 1)


def _saving(s: PaperSetting, elements: int) -> float:
    buffered = 2 * (s.selected + s.outliers) * s.chunk * elements
    kept = s.context * s.kv_dim / s.chunk + buffered + s.context * s.rank + s.rank * s.kv_dim
    return 2 * s.context * s.kv_dim / kept
