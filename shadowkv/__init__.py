"""shadowkv: serves long-context language models in large batches on one GPU, with compressed KV caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "KVSpec",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

if TYPE_CHECKING:
    from shadowkv.engine.llm import LLM
    from shadowkv.engine.results import CompletionOutput, RequestOutput
    from shadowkv.engine.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
    from shadowkv.kvcache.policy.spec import KVSpec

_HOMES = {
    "LLM": "shadowkv.engine.llm",
    "CompletionOutput": "shadowkv.engine.results",
    "RequestOutput": "shadowkv.engine.results",
    "SamplingParams": "shadowkv.engine.sampling_params",
    "RepetitionDetectionParams": "shadowkv.engine.sampling_params",
    "StructuredOutputsParams": "shadowkv.engine.sampling_params",
    "KVSpec": "shadowkv.kvcache.policy.spec",
}


def __getattr__(name: str) -> Any:
    # Imports are lazy, so that `--help` and the planner do not wait for PyTorch.
    if name not in _HOMES:
        raise AttributeError(f"module 'shadowkv' has no attribute {name!r}")
    from importlib import import_module

    from shadowkv.threads import wait_asleep

    wait_asleep()  # the module of any of these names may be the first to import PyTorch
    return getattr(import_module(_HOMES[name]), name)
