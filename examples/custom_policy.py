"""A cache policy of one's own, put together from parts, beside the default one on the same prompt.

    python examples/custom_policy.py

``docs/formats.md`` has the parts' sizes, ``shadowkv eval`` says what a policy costs in quality.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shadowkv import LLM, KVSpec, SamplingParams
from shadowkv.kvcache.presets import preset

PROMPT = "The lighthouse keeper wrote in his diary: "


def policies() -> dict[str, KVSpec]:
    """Keys × index × values × place, by name."""
    return {
        "turbo": preset("turbo"),
        # Any field of a preset can be changed, here or on the command line: --kv turbo:chunk=8,values=dense
        "turbo with exact values, in chunks of 8": replace(preset("turbo"), chunk=8, values="dense"),
        # Quest's bounds over keys and values in 4 bits.
        "bounds over 4 bits": preset("quest:keys=lloyd-4bit,values=lloyd-4bit"),
    }


def main(model: str = "smollm2-135m-instruct", **options: Any) -> None:
    """Prints each policy's answer; ``options`` are those of ``EngineConfig``."""
    for name, spec in policies().items():
        # 0: even a short prompt is compressed, which it would not be by default.
        with LLM(model, kv=spec, kv_dense_below=0, max_model_len=2048, max_num_seqs=1, **options) as llm:
            (answer,) = llm.generate([PROMPT * 40], SamplingParams(max_tokens=24, temperature=0))
        print(f"{name}: {answer.outputs[0].text!r}")


if __name__ == "__main__":
    main()
