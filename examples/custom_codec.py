"""A format of rows of one's own, as values of any policy: a byte for each dimension, and one scale for each row.

    python examples/custom_codec.py

It runs in PyTorch. CONTRIBUTING.md says how kernels learn a format. In a package of your own, an entry point of the
group ``shadowkv.plugins`` names ``register``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shadowkv import LLM, SamplingParams
from shadowkv.kvcache import codecs
from shadowkv.ops.codec import RowCodec

PROMPT = "The lighthouse keeper wrote in his diary: "


class ByteRows(RowCodec):
    """Whole steps from -127 to 127, plus 128. The scale is the size of a step."""

    id = 1000
    name = "byte-rows"

    def row_bytes(self, dim: int) -> int:
        return dim

    def encode(self, rows: Tensor, rotation: Tensor | None, state: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
        scale = (rows.float().abs().amax(-1, keepdim=True) / 127).half()
        steps = (rows.float() / scale.float().clamp(min=1e-7)).round().clamp(-127, 127)
        return (steps + 128).to(torch.uint8), scale

    def decode(
        self, codes: Tensor, scale: Tensor, rotation: Tensor | None, dim: int, state: tuple[Tensor, ...] = ()
    ) -> Tensor:
        return (codes.float() - 128) * scale.float()


def register() -> None:
    """Makes ``values=byte-rows`` and ``keys=byte-rows`` known to all policies."""
    codecs.register(ByteRows())


def main(model: str = "smollm2-135m-instruct", **options: Any) -> None:
    """Prints each policy's answer; ``options`` are those of ``EngineConfig``."""
    register()
    for kv in ("full", "turbo:values=byte-rows", "turboquant-4:keys=byte-rows,values=byte-rows"):
        # 0: even a short prompt is compressed, which it would not be by default.
        with LLM(model, kv=kv, kv_dense_below=0, max_model_len=2048, max_num_seqs=1, **options) as llm:
            (answer,) = llm.generate([PROMPT * 40], SamplingParams(max_tokens=24, temperature=0))
        print(f"{kv}: {answer.outputs[0].text!r}")


if __name__ == "__main__":
    main()
