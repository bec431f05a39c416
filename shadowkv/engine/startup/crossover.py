"""From how many tokens on compressing a sequence pays: chosen once, from the model, the policy and the batch, never by
load, so that no prompt's answer depends on its neighbours.

A token costs its share of what a step reads, dense or compressed. A compressed sequence adds the time of the search to
a step, whatever its length, and pays once for finding its subspace and coding its tokens. A prompt of at most one
prefill block is never compressed: there is no later block of a layer to overlap that with, and its first token would
come a tenth later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.policy.growth import SETTLED
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.traffic import DEVICE_BANDWIDTH, HIT_RATE, HOST_BANDWIDTH, attention_seconds
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.decoder import Decoder

ANSWER = 256
"""Length of the answer, in tokens, over which compressing its prompt has to pay off."""


@dataclass(frozen=True)
class Costs:
    """Costs of a kind of device, in seconds, and in bytes per second.

    All but the bandwidths were measured with ``turbo`` and stand for every policy.

    Attributes:
        bandwidth, host_bandwidth: at which steps read tokens on the device and values on the host.
        step: per layer, by which a step takes longer if any of its sequences is compressed.
        row: per layer and compressed sequence.
        fit: per layer, for a prompt's subspaces and maps.
        compress: per layer and dimension of all kv heads, for each token of a prompt.
    """

    bandwidth: float
    host_bandwidth: float
    step: float
    row: float
    fit: float
    compress: float


COSTS = {
    # One H200, Llama-3.1-8B: in a step of one sequence of 60K, 1.2 ms are neither bytes nor the dense step's; prompts
    # of 512 to 2,048 tokens take 15 to 17 ms more than under `full`, one of 8,192 takes 32, one of 60K 55.
    "cuda": Costs(DEVICE_BANDWIDTH, HOST_BANDWIDTH, step=37e-6, row=0.0, fit=0.015 / 32, compress=2e-6 / (32 * 1024)),
    # SmolLM2-135M in blocks, CPU time of one thread: a step of one sequence takes 73, 104 and 106 ms with `turbo` at
    # 6,144, 18,816 and 32,000 tokens, and 46, 101 and 171 with `full`; one of eight sequences 304 and 421 at 4,096 and
    # 12,288, and 186 and 481. That is less for each, but one user, as a CPU mostly has, is not to wait for eight.
    "cpu": Costs(14e9, 14e9, step=0.0, row=1.8e-3, fit=0.1 / 30, compress=250e-6 / (30 * 192)),
}


def dense_below(model: ModelConfig, forced: Layout, device: str, batch: int, cache_bytes: int | None = None) -> int:
    """Minimum number of tokens from which on a sequence is compressed.

    Args:
        forced: layout of the policy that compresses all it can, for sequences up to the longest.
        device: its type.
        batch: most sequences that run at once.
        cache_bytes: device bytes for their pages; None is enough for all.
    """
    costs, longest = COSTS[device], forced.max_model_len
    dense = Layout(KVSpec(), forced.shape, forced.dtype, longest)
    weights = Decoder(model, forced.dtype, "meta")

    def seconds(layout: Layout, tokens: int) -> float:
        """Time of one token for each sequence in a full batch of sequences of ``tokens``."""
        rows, need = batch, layout.demand(tokens, tokens)
        if cache_bytes is not None:
            pages = Blocks({kind: need[kind] for kind in layout.paged})
            rows = max(1, min(rows, cache_bytes // layout.tier_bytes(pages)["device"]))  # the others wait
        read = weights.bytes_read(rows) / costs.bandwidth
        reads = attention_seconds(layout, tokens, HIT_RATE, costs.bandwidth, costs.host_bandwidth)
        if layout is dense:
            return read / rows + reads
        compressed = [group.shape for group in layout.groups if group.spec.compresses]
        layers = sum(shape.num_layers for shape in compressed)
        dims = sum(shape.num_layers * shape.num_kv_heads * shape.head_dim for shape in compressed)
        once = (costs.fit * layers if layout.learns else 0.0) + costs.compress * dims * tokens
        return (read + layers * costs.step) / rows + reads + layers * costs.row + once / ANSWER

    below = longest + 1
    for tokens in reversed(
        [*_lengths(max(SETTLED, BLOCK_TOKENS[device] + PAGE, forced.spec.dense_limit + 1), longest)]
    ):
        if seconds(forced, tokens) >= seconds(dense, tokens):
            break
        below = tokens
    return below


def _lengths(first: int, last: int) -> Iterator[int]:
    """A few lengths, each a quarter longer than the one before, in whole pages."""
    tokens = first
    while tokens <= last:
        yield tokens
        tokens = -(-tokens * 5 // 4 // PAGE) * PAGE
