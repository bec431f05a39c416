"""A cache policy of one's own with a setting of its own, beside the default one on the same prompt.

    python examples/custom_policy.py

``docs/formats.md`` has the parts' sizes, ``shadowkv eval`` says what a policy costs in quality.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shadowkv import LLM, KVSpec, SamplingParams
from shadowkv.kvcache import parts, presets
from shadowkv.kvcache.memory.compressed import CompressedStore
from shadowkv.kvcache.parts.base import CompressedTokens
from shadowkv.kvcache.parts.rows import DenseValues
from shadowkv.settings import at_least, setting

PROMPT = "The lighthouse keeper wrote in his diary: "


class RoundedValues(DenseValues):
    """Values that keep a few significant bits: it shows what fewer bits cost, and saves none."""

    @dataclass(frozen=True)
    class Settings:
        bits: int = setting(4, "values", "significant bits of a value", check=at_least(1))

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        mantissa, exponent = tokens.values.float().frexp()
        rounded = (mantissa * 2**self.settings.bits).round().ldexp(exponent - self.settings.bits)
        super().compress(store, replace(tokens, values=rounded.to(tokens.values.dtype)))


def register() -> None:
    """Makes ``--kv rounded`` and ``--kv rounded:bits=2`` known, and ``values=rounded`` for any policy."""
    parts.register("values", "rounded", RoundedValues)
    presets.register("rounded", KVSpec(keys="low-rank-int4", index="sketch", values="rounded", chunk=1))


def main(model: str = "smollm2-135m-instruct", **options: Any) -> None:
    """Prints each policy's answer; ``options`` are those of ``EngineConfig``."""
    register()
    for kv in ("turbo", "rounded", "rounded:bits=1", "quest:values=rounded,bits=2"):
        # 0: even a short prompt is compressed, which it would not be by default.
        with LLM(model, kv=kv, kv_dense_below=0, max_model_len=2048, max_num_seqs=1, **options) as llm:
            (answer,) = llm.generate([PROMPT * 40], SamplingParams(max_tokens=24, temperature=0))
        print(f"{kv}: {answer.outputs[0].text!r}")


if __name__ == "__main__":
    main()
