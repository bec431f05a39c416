"""The way of tokens through a model's layers: the only place where these are walked.

Decode steps, micro-batches of them, prompts, prompts in blocks, and prompts beside a step are flows of tokens with a
batch each. What drives the walk may pause it wherever it yields, or capture it in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from shadowkv.kvcache.batch import Batch
from shadowkv.kvcache.cache import FanOut, KVCache
from shadowkv.kvcache.prefill.batch import PrefillBatch
from shadowkv.layers.decoder_layer import DecoderLayer


class Flow:
    """Tokens on their way through the layers.

    Args:
        x: their residual stream [T, D] before the first layer.
        batch: what the cache makes of them.
        last: the same in the last layer, where attention may be needed of fewer tokens; None where it is not.
        in_place: whether ``x`` is changed in every layer, so that nothing else is kept of the tokens between two.

    Attributes:
        x: the residual stream, in the end of the tokens whose attention the last layer needs.
        added: what is to be added to it; None where that has been done.
    """

    def __init__(self, x: Tensor, batch: Batch, last: Batch | None = None, in_place: bool = False) -> None:
        self.x = x
        self.added: Tensor | None = None
        self._batch, self._last, self._in_place = batch, last or batch, in_place
        self._finish: Callable[[], tuple[Tensor, Tensor]] | None = None

    @property
    def sum(self) -> Tensor:
        """Both together."""
        return self.x if self.added is None else self.x + self.added

    def start(self, layer: DecoderLayer, cache: Any, is_last: bool) -> None:
        """Starts a layer, the one before has been finished."""
        batch = self._last if is_last else self._batch
        if batch.needed is not None and not len(batch.needed):
            layer.append(self.x, self.added, cache, batch)
            self.x, self.added = self.x[:0], None
        else:
            self._finish = layer.start(self.x, self.added, cache, batch)

    def finish(self) -> None:
        """Finishes the layer that has been started, if any."""
        if self._finish is None:
            return
        (x, added), self._finish = self._finish(), None
        if self._in_place:
            self.x = torch.add(x, added, out=self.x if len(x) == len(self.x) else None)
        else:
            self.x, self.added = x, added


def forward(
    layers: Sequence[DecoderLayer], cache: KVCache | FanOut, flows: Sequence[Flow], prompts: PrefillBatch | None = None
) -> Generator[None, None, None]:
    """Takes ``flows`` through ``layers``, each layer in their order, and pauses after each.

    Args:
        prompts: the prompts among the tokens, each layer of which is stored once all flows have been through it: flows
            are its blocks. Without it flows are micro-batches, each of which finishes a layer when it is to start the
            next one: what it waits for arrives while the others compute.
    """
    for number, layer in enumerate(layers, 1):
        for flow in flows:
            flow.finish()
            flow.start(layer, cache, number == len(layers))
            if prompts is not None:
                flow.finish()
            yield
        if prompts is not None:
            cache.finish_prefill(number - 1, prompts)
    for flow in flows:
        flow.finish()


def run_through(generator: Generator[None, None, Any]) -> Any:
    """What a generator returns, without any pause."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value
