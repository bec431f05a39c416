"""``DraftHead``: a layer of a checkpoint that predicts the token after the next one (multi-token prediction:
DeepSeek-V3, arXiv:2412.19437, section 2.2). ``HeadRunner`` drafts with it.

The row of token t has two inputs: the embedding of token t + 1, and the model's final hidden state of token t. Its
logits are those of token t + 2. Further tokens are drafted by the same layer, from its own hidden states.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shadowkv.layers.decoder_layer import DecoderLayer
from shadowkv.layers.norm import RMSNorm
from shadowkv.layers.spec import LayerSpec, projection
from shadowkv.models.configs.model_config import ModelConfig


class DraftHead(nn.Module):
    """A model of one layer over packed tokens, which a ``Runner`` runs like a ``Decoder``. In shapes, n is a number of
    rows, D is the hidden size and V the size of the vocabulary.

    Args:
        spec: sizes, and row blocks of the head's weights outside its layer.
        config: the head's config (``ModelConfig.of_draft_head``).
        layer: the decoder layer.
        embed: embeds token ids, int64 [n] -> [n, D].
        scores_of: computes logits of normalised hidden states, [n, D] -> [n, V]. Both functions use the model's tables.
            Copies of these tables that some files have for the head are not read.

    Attributes:
        inputs: [R, D], where R is the number of rows that ``reserve`` was given: the hidden states that ``embed`` joins
            with the tokens of the same rows.
        states: [R, D]. ``scores`` writes the head's hidden states into the first rows of this tensor. They are
            normalised if ``config.normed_draft_states`` is set.
    """

    def __init__(
        self,
        spec: LayerSpec,
        config: ModelConfig,
        layer: DecoderLayer,
        embed: Callable[[Tensor], Tensor],
        scores_of: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.config, self.device, self.group = config, spec.device, spec.group
        self._embed, self._scores_of, self._dtype = embed, scores_of, spec.dtype

        def norm() -> RMSNorm:
            return RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype=spec.norm_dtype, device=spec.device)

        self.embedding_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
        self.projection = projection(spec, "projection", 2 * spec.hidden_size, spec.hidden_size)
        self.layers = nn.ModuleList([layer])
        self.reserve(0)

    def reserve(self, rows: int) -> None:
        """Allocates ``inputs`` and ``states`` for up to ``rows`` rows."""
        size = rows, self.config.hidden_size
        self.inputs, self.states = (torch.zeros(size, dtype=self._dtype, device=self.device) for _ in range(2))

    def embed(self, token_ids: Tensor, states: Tensor | None = None) -> Tensor:
        """Returns the residual stream [n, D] of token ids, int64 [n], and of hidden ``states`` [n, D]. None stands for
        the first n ``inputs``."""
        hidden = self.hidden_norm(self.inputs[: len(token_ids)] if states is None else states)
        joined: Tensor = self.projection(torch.cat((self.embedding_norm(self._embed(token_ids)), hidden), -1))
        return joined

    def layer_inputs(self, token_ids: Tensor, embedded: Tensor | None = None) -> None:
        """Returns None: the layer has no per-layer inputs (``Decoder.layer_inputs``)."""

    def scores(self, hidden: Tensor, added: Tensor | None = None) -> Tensor:
        """Returns logits [n, V] as ``Decoder.scores`` does."""
        stream = hidden if added is None else hidden + added
        normed = self.norm(stream)
        self.states[: len(stream)] = normed if self.config.normed_draft_states else stream
        return self._scores_of(normed)
