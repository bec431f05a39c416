"""Rotary position embedding: a model's frequencies, with every scaling that supported models use, and the tables of
cosines and sines.

The cache applies RoPE, because it compresses keys before RoPE (ShadowKV, arXiv:2410.21465, section 3.1). Sources:
RoFormer, arXiv:2104.09864; YaRN, arXiv:2309.00071; LongRoPE, arXiv:2402.13753; the release notes of Llama 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeConfig:
    """A model's RoPE.

    Attributes:
        head_dim: dimensions of one head.
        theta: base of the frequencies.
        rotary_dim: leading dimensions that rotate (GLM rotates half of them); None means all.
        interleaved: whether RoPE rotates the pairs (0, 1), (2, 3)… (GLM) instead of (i, i + rotary_dim / 2).
        scaling: ``none``, ``linear``, ``llama3``, ``yarn``, ``longrope`` or ``proportional``.
        factor: context extension factor of the scaling.
        original_max_position: context of the model before the extension.
        low_freq_factor, high_freq_factor: llama3's two wavelength bounds.
        beta_fast, beta_slow: bounds of YaRN's ramp, in rotations over the original context.
        attention_factor: multiplier of cos and sin (YaRN, LongRoPE); None derives it from ``factor``.
        factors: LongRoPE's divisor of each frequency, from its short or its long set. Loading a model chooses the set.
        truncate: whether YaRN's ramp starts and ends at whole dimensions.
        proportion: share of the pairs of dimensions that rotate, with ``proportional`` scaling (Gemma 4). The first
            pairs rotate. Their frequencies are the same as if all pairs rotated.
    """

    head_dim: int
    theta: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = False
    scaling: str = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    factors: tuple[float, ...] = ()
    truncate: bool = True
    proportion: float = 1.0

    @property
    def dim(self) -> int:
        """Dimensions that rotate."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def rotating_pairs(self) -> int:
        """Number of leading pairs of dimensions that rotate. Other pairs have frequency 0."""
        share = self.proportion if self.scaling == "proportional" else 1.0
        return int(share * self.dim // 2)

    def inverse_frequencies(self) -> Tensor:
        """Radians per position, float64 [dim / 2]."""
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim
        inverse = self.theta**-exponent
        if self.scaling == "none":
            return inverse
        if self.scaling == "linear":
            return inverse / self.factor
        if self.scaling == "llama3":
            return self._llama3(inverse)
        if self.scaling == "yarn":
            return self._yarn(inverse)
        if self.scaling == "longrope":
            if len(self.factors) != self.dim // 2:
                raise ValueError(f"longrope needs {self.dim // 2} factors, got {len(self.factors)}")
            return inverse / torch.tensor(self.factors, dtype=torch.float64)
        if self.scaling == "proportional":
            rotating = torch.arange(len(inverse)) < self.rotating_pairs
            return inverse * rotating / self.factor
        known = "none, linear, llama3, yarn, longrope, proportional"
        raise ValueError(f"rope scaling {self.scaling!r} is not one of {known}")

    @property
    def magnitude(self) -> float:
        """Factor of cos and sin. It is 1 unless the scaling changes the attention's temperature."""
        if self.scaling not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1.0:
            return 1.0
        if self.scaling == "yarn":
            return 0.1 * math.log(self.factor) + 1.0
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_max_position))

    @property
    def is_finite(self) -> bool:
        """Whether the scaling yields frequencies that are finite and not negative, and a finite positive magnitude."""
        try:
            inverse = self.inverse_frequencies()
            return bool(inverse.isfinite().all() and (inverse >= 0).all()) and 0 < self.magnitude < math.inf
        except (ArithmeticError, ValueError):  # an undefined logarithm or quotient
            return False

    def _llama3(self, inverse: Tensor) -> Tensor:
        wavelength = 2 * math.pi / inverse
        low = self.original_max_position / self.low_freq_factor
        high = self.original_max_position / self.high_freq_factor
        smooth = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - smooth) * inverse / self.factor + smooth * inverse
        scaled = torch.where(wavelength > low, inverse / self.factor, inverse)
        return torch.where((wavelength <= low) & (wavelength >= high), blended, scaled)

    def _yarn(self, inverse: Tensor) -> Tensor:
        def dimension(rotations: float) -> float:
            return (
                self.dim * math.log(self.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))
            )

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(self.dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        return inverse / self.factor * ramp + inverse * (1 - ramp)


def no_rope(head_dim: int) -> RopeConfig:
    """Returns a RoPE that rotates nothing, for models whose attention has no positions. All its frequencies are 0."""
    return RopeConfig(head_dim, scaling="proportional", proportion=0.0)


class RotaryTables:
    """Tables of cos and sin, float32 [max_positions, dim / 2], computed in float64.

    Angles computed in float32 are off by up to 0.06 rad at position 1e6. In float64, only the rounding of the tables
    to float32 remains.
    """

    def __init__(self, config: RopeConfig, max_positions: int, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.max_positions = max_positions
        angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * config.inverse_frequencies()
        self.cos = (angles.cos() * config.magnitude).float().to(device)
        self.sin = (angles.sin() * config.magnitude).float().to(device)
