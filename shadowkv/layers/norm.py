"""RMSNorm (arXiv:1910.07467) with the mean square accumulated in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shadowkv.layers.computing import Computing
from shadowkv.layers.group import Group


class RMSNorm(Computing):
    """x / rms(x) * weight over the last dimension.

    Args:
        dtype: dtype of the weight: the dtype of x, or float32 (see the op ``rms_norm``).
        learned: whether the weight is learned; if not, it is 1.
    """

    weight: Tensor

    calls = ("add_rms_norm", "rms_norm")

    def __init__(
        self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device, learned: bool = True
    ) -> None:
        super().__init__()
        if learned:
            self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        else:
            self.register_buffer("weight", torch.ones(size, dtype=dtype, device=device), persistent=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size] in the dtype of x."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def after_add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x + delta, and the norm of this sum, each [..., size]."""
        return self.ops.add_rms_norm(x, delta, self.weight, self.eps)


class JointNorm(RMSNorm):
    """RMSNorm over all heads of a token together. Each rank has some of the heads.

    Args:
        heads: number of heads of this rank.
        whole: number of heads of all ranks together.
    """

    def __init__(
        self,
        heads: int,
        whole: int,
        head_dim: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
    ) -> None:
        super().__init__(heads * head_dim, eps, dtype=dtype, device=device)
        self.size, self.group = whole * head_dim, group

    def forward(self, x: Tensor) -> Tensor:
        """[T, heads, d] -> [T, heads, d] in the dtype of x."""
        flat = x.flatten(1)
        if self.group.size == 1:
            return super().forward(flat).view(x.shape)
        squares = torch.linalg.vector_norm(flat, dim=-1, keepdim=True, dtype=torch.float32).square_()
        scale = torch.rsqrt(self.group.sum(squares) / self.size + self.eps)
        normed = self.weight * (flat * scale).to(self.weight.dtype)
        return normed.to(x.dtype).view(x.shape)


class GroupNorm(nn.Module):
    """RMSNorm that normalises each of ``count`` groups of neighbouring dimensions by itself. Each dimension has its own
    weight.

    Args:
        size: dimensions of all groups together.
        count: number of groups.
    """

    def __init__(self, size: int, count: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.count, self.eps = count, eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size] in the dtype of x."""
        groups = x.float().unflatten(-1, (self.count, -1))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.weight.float()).to(x.dtype)
