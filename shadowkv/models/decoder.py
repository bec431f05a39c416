"""Decoder: embedding, decoder layers, final norm and head, for every supported family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shadowkv.layers.computing import Computing
from shadowkv.layers.decoder_layer import DecoderLayer
from shadowkv.layers.group import ALONE, Group
from shadowkv.layers.linear import SCALE
from shadowkv.layers.moe import ExpertsProjection
from shadowkv.layers.norm import RMSNorm
from shadowkv.layers.per_layer_inputs import LayerInput, PerLayerInputs
from shadowkv.layers.quantized_matrix import QuantizedLinear, QuantizedMatrix, RowBlock
from shadowkv.layers.spec import ON_DEVICE, PLACES, LayerSpec, TableForm
from shadowkv.layers.streams.hyper_connections import HyperConnectedLayer, StreamMixer
from shadowkv.layers.streams.row_table import RowTable
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.draft_head import DraftHead
from shadowkv.models.sharding import vocabulary_rows
from shadowkv.ops.quantized_matmul.humming import Packed, compile_kernels
from shadowkv.ops.registry import Ops
from shadowkv.wording import GIB, counted


class Decoder(nn.Module):
    """A decoder-only model over packed tokens; the engine runs its layers, one after the other.

    The weights are uninitialised until a loader fills them. The layers have no ops to compute with until an engine
    calls ``use``. On the ``meta`` device nothing is allocated, which is enough for ``num_parameters`` and
    ``num_bytes``. In shapes, T and n are numbers of tokens, D is the hidden size and V the size of the vocabulary.

    Args:
        config: the model.
        dtype: dtype of activations and of unquantized weights, except norms under ``wide_norms``.
        device: device of the weights.
        row_blocks: the row blocks (rows in one form each) of each parameter that stays quantized as in the checkpoint,
            by the parameter's name.
        group: the ranks that the model is split across. With several ranks, ``config`` is ``Shard.config``, this rank's
            part.
        tables: how tables of n-gram embeddings are stored.

    Attributes:
        draft_head: the layer that drafts tokens; None if ``config`` has none.
        states: None, or [R, D] for the final hidden states of up to R rows. ``scores`` copies them to this tensor, and
            a draft head reads them there. It is always the same tensor, because CUDA graphs need fixed addresses.
        prompt_tail: number of the last new tokens of each prompt whose final hidden states a prefill computes: 1, or
            more for a draft head.
        prompt_states: the final hidden states [n, D] that the last prefill has computed for the draft head, prompt by
            prompt; None if the head has read them, or if there is no head.
        graph_states: [T, D], where a CUDA graph leaves the final hidden states of its prompts' tokens, up to T; None
            without a draft head or without graphs.
    """

    prompt_states: Tensor | None
    graph_states: Tensor | None

    embedding: nn.Parameter | QuantizedMatrix
    head: nn.Parameter | QuantizedMatrix | None

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        row_blocks: Mapping[str, tuple[RowBlock, ...]] = MappingProxyType({}),
        group: Group = ALONE,
        tables: TableForm = ON_DEVICE,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.group = group
        spec = _spec(config, dtype, self.device, group, tables)
        self.embedding = self._table(row_blocks.get("embedding"))
        self.layers = nn.ModuleList(_layer(spec, config, layer, row_blocks) for layer in range(config.num_layers))
        self.per_layer_inputs = None
        if config.hidden_size_per_layer_input:
            self.per_layer_inputs = PerLayerInputs(spec, config.num_layers, config.vocab_size_per_layer_input)
        self.norm: RMSNorm | StreamMixer
        if config.streams is None:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=spec.norm_dtype, device=self.device)
        else:
            self.norm = StreamMixer(spec, injects=False)
        self.head = None if config.tie_word_embeddings else self._table(row_blocks.get("head"))
        self.states: Tensor | None = None
        self.prompt_tail, self.prompt_states, self.graph_states = 1, None, None
        self.draft_head = None
        if config.draft_head:
            own, of_head = config.of_draft_head, _within("draft_head.", row_blocks)
            layer, of_spec = _layer(spec, own, 0, of_head), replace(spec, row_blocks=of_head)
            assert isinstance(layer, DecoderLayer), "a draft head has one residual stream"
            self.draft_head = DraftHead(of_spec, own, layer, self.embed, self.scores_of)

    def _table(self, row_blocks: tuple[RowBlock, ...] | None) -> nn.Parameter | QuantizedMatrix:
        if row_blocks is not None:
            return QuantizedMatrix(self.config.hidden_size, row_blocks, dtype=self.dtype, device=self.device)
        size = (vocabulary_rows(self.config, self.group.size), self.config.hidden_size)
        return nn.Parameter(torch.empty(size, dtype=self.dtype, device=self.device), requires_grad=False)

    @property
    def called_ops(self) -> frozenset[str]:
        """Names of the ops that the layers call."""
        return frozenset(name for module in self._computing() for name in module.calls)

    def use(self, ops: Ops) -> None:
        """Makes the layers compute with ``ops``, the ops of the engine that runs them from now on."""
        for module in self._computing():
            module.ops = ops

    def pack(self) -> None:
        """Packs loaded weights that stay quantized for the GPU's matrix products, and compiles their kernels."""
        packed = list[Packed]()
        for module in self.modules():
            if isinstance(module, QuantizedLinear):
                packed += module.weight.pack(module.borders)
            elif isinstance(module, ExpertsProjection) and isinstance(module.weight, QuantizedMatrix):
                packed.append(module.weight.pack_experts(module.count, module.total))
        head = self.embedding if self.head is None else self.head
        if isinstance(head, QuantizedMatrix):
            packed += head.pack(looked_up=self.head is None)
        compile_kernels(packed)
        if packed:
            torch.cuda.empty_cache()  # frees the unpacked weights: the KV cache is sized by free memory

    def embed(self, token_ids: Tensor) -> Tensor:
        """Returns the residual stream [T, D] of token ids, int64 [T]. If the model has several residual streams
        (hyper-connections), they are concatenated: [T, streams * D]."""
        x = self._look_up(token_ids)
        if self.config.streams is not None:
            x = x.repeat(1, self.config.streams.count)
        if self.config.embedding_scale == 1.0:
            return x
        return x * torch.tensor(self.config.embedding_scale, dtype=x.dtype).item()  # rounded, as in the families' code

    def layer_inputs(self, token_ids: Tensor, embedded: Tensor | None = None) -> LayerInput | None:
        """Returns a function from a layer's number to the inputs to that layer alone, for the tokens ``token_ids``,
        int64 [T]. If the model has n-gram layers, the function returns the token ids. None if layers have no such
        inputs.

        Args:
            embedded: ``embed(token_ids)``, if the caller keeps it until the last layer. If None, it is computed again
                for each layer.
        """
        inputs = self.per_layer_inputs
        if self.config.n_gram_layers:
            return lambda layer: token_ids
        if inputs is None:
            return None
        return lambda layer: inputs(token_ids, self.embed(token_ids) if embedded is None else embedded, layer)

    def _look_up(self, token_ids: Tensor) -> Tensor:
        if isinstance(self.embedding, QuantizedMatrix):
            return self.embedding.look_up(token_ids)
        if self.group.size == 1:
            return F.embedding(token_ids, self.embedding)
        rows = token_ids - self.group.rank * len(self.embedding)
        here = (rows >= 0) & (rows < len(self.embedding))
        embedded = F.embedding(torch.where(here, rows, 0), self.embedding)
        return self.group.sum(embedded * here.unsqueeze(-1))

    def logits(self, hidden: Tensor, added: Tensor | None = None) -> Tensor:
        """Returns logits, float32 [n, V], on every rank.

        Args:
            hidden: the residual stream after the last layer, [n, D].
            added: the last layer's output, [n, D], if ``hidden`` does not include it yet; None if it does.
        """
        return self.scores(hidden, added).float()

    def scores(self, hidden: Tensor, added: Tensor | None = None) -> Tensor:
        """Returns ``logits`` in the dtype of activations."""
        return self.kept_scores(self.normed(hidden, added))

    def normed(self, hidden: Tensor, added: Tensor | None = None) -> Tensor:
        """Returns normalised final hidden states [n, D]. Arguments are as in ``logits``."""
        return self.norm(hidden) if added is None else self.norm.after_add(hidden, added)[1]

    def kept_scores(self, normed: Tensor) -> Tensor:
        """Returns ``scores_of(normed)``. Writes ``normed`` [n, D] into ``states`` if there are any."""
        if self.states is not None:
            self.states[: len(normed)] = normed[: len(self.states)]
        return self.scores_of(normed)

    def scores_of(self, normed: Tensor) -> Tensor:
        """Returns logits, in the dtype of activations, of normalised final hidden states [n, D]."""
        head = self.embedding if self.head is None else self.head
        if isinstance(head, QuantizedMatrix):
            scores: Tensor = head(normed, 0, self.config.vocab_size)
        else:
            scores = self.group.join(F.linear(normed, head))[:, : self.config.vocab_size]
        cap = self.config.final_logit_softcapping
        return scores if cap is None else (scores / cap).tanh_().mul_(cap)

    @property
    def weights_description(self) -> str:
        """How the weights are stored, in words."""
        dtype, forms = str(self.dtype).removeprefix("torch."), " and ".join(self.forms)
        if self.config.quantization is None:
            return f"{dtype}, {forms} weights" if forms else dtype
        experts = f", those of experts in {forms or dtype}" if self.config.experts else ""
        return f"{dtype}, {self.config.quantization} weights{experts}"

    @property
    def forms(self) -> list[str]:
        """Names of the forms of weights that stay quantized as in the checkpoint."""
        matrices = self._quantized_matrices()
        return sorted({block.form.name for matrix in matrices for block in matrix.row_blocks if block.form is not None})

    @property
    def num_parameters(self) -> int:
        """Number of the model's weights. Tied weights count once, and scales of quantized ones do not count."""
        matrices = self._quantized_matrices()
        kept = {id(part) for matrix in matrices for part in matrix.parameters()}
        of_tables = sum(table.num_values for table in self.tables.values() if table.weight is None)
        return (
            sum(matrix.num_values for matrix in matrices)
            + of_tables
            + sum(
                weight.numel()
                for name, weight in self.named_parameters()
                if id(weight) not in kept and not name.endswith(f".weight{SCALE}")
            )
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights on the device, scales included."""
        return sum(parameter.nbytes for parameter in self.parameters())

    @property
    def tables(self) -> dict[str, RowTable]:
        """The tables of n-gram embeddings, by name, wherever they are."""
        return {name: module for name, module in self.named_modules() if isinstance(module, RowTable)}

    @property
    def table_bytes(self) -> Counter[str]:
        """Bytes of ``tables`` in each place (``PLACES``)."""
        found = Counter[str]()
        for table in self.tables.values():
            found[table.place] += table.nbytes
        return found

    @property
    def tables_description(self) -> str | None:
        """Size and place of ``tables``, in words; None without tables."""
        if not self.tables:
            return None
        first = next(iter(self.tables.values()))
        dtype = str(first.stored).removeprefix("torch.")
        count, size = counted(len(self.tables), "table"), self.table_bytes.total() / GIB
        return f"{count} of n-gram embeddings, {size:.2f} GiB in {dtype}, {PLACES[first.place]}"

    @property
    def num_packed_bytes(self) -> int:
        """Predicts what ``num_bytes`` will be once a GPU has packed the weights. Use it only before they are packed."""
        return self.num_bytes + sum(
            module.packed_twice for module in self.modules() if isinstance(module, QuantizedLinear)
        )

    def bytes_read(self, batch: int) -> float:
        """Bytes of the weights that a decode step of ``batch`` sequences reads.

        The draft head does not count. An embedding table that is not also the head does not count, because a step reads
        only a few of its rows. Experts count with the expected number of bytes, assuming that all experts are chosen
        equally often. Call it before ``pack``: packing stores some rows twice, and they would count twice.
        """
        tables = 0 if self.per_layer_inputs is None else self.per_layer_inputs.table.nbytes
        tables += self.table_bytes["device"]
        read = self.num_bytes - self._looked_up_bytes - tables - self.head_bytes
        if self.config.experts is None:
            return read
        return read - (1 - self.config.experts.routing.share_touched(batch)) * self.expert_bytes

    @property
    def _looked_up_bytes(self) -> int:
        """Bytes of the embedding that matrix products do not read. If the head is a separate matrix, that is the whole
        embedding. If the embedding is also the head and is packed, it is the unpacked copy for look-ups. Otherwise it
        is 0."""
        if self.head is not None:
            return self.embedding.nbytes
        if not isinstance(self.embedding, QuantizedMatrix) or self.embedding.packed is None:
            return 0
        return sum(part.nbytes for part in self.embedding.parts)

    @property
    def head_bytes(self) -> int:
        """Bytes of the draft head's weights; 0 without one."""
        return 0 if self.draft_head is None else sum(weight.nbytes for weight in self.draft_head.parameters())

    @property
    def expert_bytes(self) -> int:
        """Bytes of the experts' weights in all layers, without shared experts."""
        return sum(weight.nbytes for name, weight in self.layers.named_parameters() if ".mlp.experts." in name)

    def _computing(self) -> Iterator[Computing]:
        return (module for module in self.modules() if isinstance(module, Computing))

    def _quantized_matrices(self) -> list[QuantizedMatrix]:
        return [module for module in self.modules() if isinstance(module, QuantizedMatrix)]


def _spec(config: ModelConfig, dtype: torch.dtype, device: torch.device, group: Group, tables: TableForm) -> LayerSpec:
    """The spec of a model's layers, without the fields that differ between layers. ``_layer`` sets these."""
    return LayerSpec(
        heads=config.shape.heads,
        cached_as=0,
        reuses_keys=False,
        keys_are_values=False,
        intermediate_size=config.intermediate_size,
        experts=None,
        linear=None,
        indexer=None,
        n_grams=None,
        row_blocks={},
        hidden_size=config.hidden_size,
        rms_norm_eps=config.rms_norm_eps,
        activation=config.activation,
        qkv_bias=config.qkv_bias,
        out_bias=config.attention_out_bias,
        qk_norm=config.qk_norm,
        normed_heads=config.normed_heads,
        sinks=config.sinks,
        output_gate=config.output_gate,
        post_norms=config.post_norms,
        value_norm=config.value_norm,
        per_layer_input_size=config.hidden_size_per_layer_input,
        streams=config.streams,
        tables=tables,
        output_scale=config.output_scale,
        quantization=config.quantization,
        dtype=dtype,
        norm_dtype=torch.float32 if config.wide_norms else dtype,
        device=device,
        group=group,
    )


def _layer(
    spec: LayerSpec, config: ModelConfig, layer: int, row_blocks: Mapping[str, tuple[RowBlock, ...]]
) -> DecoderLayer | HyperConnectedLayer:
    """Makes a layer. ``row_blocks`` has the row blocks of all layers."""
    own = replace(
        spec,
        heads=config.heads_of(layer),
        cached_as=config.cached_as(layer),
        reuses_keys=config.reuses_keys(layer),
        keys_are_values=config.has_keys_as_values(layer),
        intermediate_size=config.width_of(layer),
        experts=config.experts_of(layer),
        linear=config.linear_of(layer),
        indexer=config.indexer_of(layer),
        n_grams=config.n_grams_of(layer),
        row_blocks=_within(f"layers.{layer}.", row_blocks),
    )
    return (DecoderLayer if config.streams is None else HyperConnectedLayer)(own, layer)


def _within(prefix: str, row_blocks: Mapping[str, tuple[RowBlock, ...]]) -> dict[str, tuple[RowBlock, ...]]:
    return {name.removeprefix(prefix): block for name, block in row_blocks.items() if name.startswith(prefix)}
