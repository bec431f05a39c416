"""Decoder: embedding, decoder layers, final norm and head of every supported family."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shadowkv.layers.decoder_layer import DecoderLayer
from shadowkv.layers.fp8_linear import SCALE
from shadowkv.layers.norm import RMSNorm
from shadowkv.layers.spec import LayerSpec
from shadowkv.models.config import ModelConfig
from shadowkv.ops import Ops


class Decoder(nn.Module):
    """A decoder-only model over packed tokens; its layers are run by the engine, one after the other.

    The weights are uninitialised until a loader fills them. On the ``meta`` device nothing is allocated, which is
    enough for ``num_parameters`` and ``num_bytes``.
    """

    head: nn.Parameter | None

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        ops = Ops("cpu" if self.device.type == "meta" else self.device)
        spec = LayerSpec(
            shape=config.shape,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            rms_norm_eps=config.rms_norm_eps,
            qkv_bias=config.qkv_bias,
            out_bias=config.attention_out_bias,
            qk_norm=config.qk_norm,
            post_norms=config.post_norms,
            quantization=config.quantization,
            dtype=dtype,
            device=self.device,
            ops=ops,
        )
        self.embedding = self._table()
        self.layers = nn.ModuleList(DecoderLayer(spec, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=self.device, ops=ops)
        self.head = None if config.tie_word_embeddings else self._table()

    def _table(self) -> nn.Parameter:
        size = (self.config.vocab_size, self.config.hidden_size)
        return nn.Parameter(torch.empty(size, dtype=self.dtype, device=self.device), requires_grad=False)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids, int64 [T] -> the residual stream [T, D]."""
        return F.embedding(token_ids, self.embedding)

    def logits(self, hidden: Tensor, added: Tensor | None = None) -> Tensor:
        """Residual stream [n, D] after the last layer, or before it and what that adds -> float32 [n, V]."""
        head = self.embedding if self.head is None else self.head
        normed = self.norm(hidden) if added is None else self.norm.after_add(hidden, added)[1]
        return F.linear(normed, head).float()

    @property
    def weights_in_words(self) -> str:
        """How weights are stored."""
        dtype = str(self.dtype).removeprefix("torch.")
        return dtype if self.config.quantization is None else f"{dtype}, {self.config.quantization} weights"

    @property
    def num_parameters(self) -> int:
        """Weights of the model, tied ones counted once; scales of quantised ones are none."""
        return sum(weight.numel() for name, weight in self.named_parameters() if not name.endswith(f".weight{SCALE}"))

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, scales included."""
        return sum(parameter.nbytes for parameter in self.parameters())
