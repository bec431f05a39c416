"""Computes the crossover length: the minimum number of tokens of a sequence at which compression saves time.
``loading.py`` calls it.

It is computed once, from the model, the policy and the batch. It does not depend on the load, so an answer does not
depend on other requests. In the model of costs, each decoded token costs its share of the bytes that a step reads. A
compressed sequence adds the time of its search to each step, and the time of fitting and compression once. A prompt of
at most one prefill block is never compressed: it has no later block whose computation could hide the compression, which
would delay the first token by about 10 %.
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
"""Assumed length of an answer, in tokens. Compression must save time over an answer of this length."""


@dataclass(frozen=True)
class Costs:
    """Costs on a type of device. Times are in seconds, bandwidths in bytes per second.

    All but the bandwidths were measured with ``turbo`` and are used for every policy.

    Attributes:
        bandwidth: bandwidth at which steps read tokens on the device.
        host_bandwidth: bandwidth at which steps read values on the host.
        step: extra time of a step, per layer, if any of its sequences is compressed.
        row: extra time of a step, per layer and compressed sequence.
        fit: time per layer to fit a prompt's states.
        compress: time to compress one token of a prompt, per layer and per dimension of its keys (number of kv heads
            times head dim).
    """

    bandwidth: float
    host_bandwidth: float
    step: float
    row: float
    fit: float
    compress: float


COSTS = {
    # One H200, Llama-3.1-8B. With one sequence of 60K tokens, a compressed step takes 1.2 ms more than is
    # predicted from the time of a dense step and the bytes that both read. Prompts of 512 to 2,048 tokens take 15 to
    # 17 ms more than under `full`, one of 8,192 takes 32 ms more, and one of 60K takes 55 ms more.
    "cuda": Costs(DEVICE_BANDWIDTH, HOST_BANDWIDTH, step=37e-6, row=0.0, fit=0.015 / 32, compress=2e-6 / (32 * 1024)),
    # SmolLM2-135M with weights in a block format of GGUF files; CPU time of one thread. A step of one sequence takes
    # 73, 104 and 106 ms with `turbo` at 6,144, 18,816 and 32,000 tokens, and 46, 101 and 171 ms with `full`. A step of
    # eight sequences takes 304 and 421 ms with `turbo` at 4,096 and 12,288 tokens, and 186 and 481 ms with `full`.
    # Eight sequences take less per sequence, but the costs are those of one sequence, because a CPU mostly serves one
    # user.
    "cpu": Costs(14e9, 14e9, step=0.0, row=1.8e-3, fit=0.1 / 30, compress=250e-6 / (30 * 192)),
}


def dense_below(model: ModelConfig, forced: Layout, device: str, batch: int, cache_bytes: int | None = None) -> int:
    """Returns the number of tokens below which a sequence stays dense (``KVSpec.dense_below``).

    Args:
        model: config of the model.
        forced: layout of the policy when it compresses every sequence that it can.
        device: the device's type.
        batch: maximum number of sequences that run at once.
        cache_bytes: device bytes for pages; None if they suffice for the whole batch.
    """
    costs, longest = COSTS[device], forced.max_model_len
    dense = Layout(KVSpec(), forced.shape, forced.dtype, longest)
    weights = Decoder(model, forced.dtype, "meta")

    def seconds(layout: Layout, tokens: int) -> float:
        """Returns a decode step's time per sequence, in a full batch of sequences of ``tokens`` tokens. It includes a
        share of the time of fitting and compression."""
        rows, need = batch, layout.demand(tokens, tokens)
        if cache_bytes is not None:
            pages = Blocks({kind: need[kind] for kind in layout.paged})
            rows = max(1, min(rows, cache_bytes // layout.tier_bytes(pages)["device"]))  # other requests wait
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
    """Yields lengths from ``first`` to ``last``. Each is a quarter longer than the one before, rounded up to whole
    pages."""
    tokens = first
    while tokens <= last:
        yield tokens
        tokens = -(-tokens * 5 // 4 // PAGE) * PAGE
