"""Parameters that are not fields of a body. They are ignored, or refused, or (if unknown) dropped and logged once. This
module also completes the parameters in ``/openapi.json``: with ranges, null, and values that have no effect."""

from __future__ import annotations

import logging
from threading import Lock
from typing import Any

from shadowkv.serve.bodies.limits import MAX_NAME_CHARS, MAX_UNKNOWN

IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    + ("prediction", "include_obfuscation", "provider_specific_fields", "verbosity")
    + ("guided_decoding_backend",)
    # From vLLM: the caller's session, the minimum number of tokens per chunk of a stream, and parameters of images.
    + ("session_id", "stream_interval", "ec_transfer_params", "mm_payload", "return_mm_kwargs")
)
"""Parameters that do not change the answer and are not logged. LiteLLM adds ``provider_specific_fields`` to messages
that it sends back."""

UNSUPPORTED = frozenset(
    # From the OpenAI API.
    ("audio", "conversation", "input", "instructions", "logprobs", "max_completion_tokens")
    + ("max_output_tokens", "max_tokens", "messages", "moderation", "previous_response_id", "prompt")
    + ("reasoning", "refusal", "response_format", "stop", "text", "top_logprobs", "web_search_options")
    # From Anthropic's API.
    + ("container", "mcp_servers", "output_config", "output_format", "stop_sequences", "system", "thinking")
    # From vLLM, llama.cpp and others, and from other routes of this server.
    + ("add_special_tokens", "parse_special")
    + ("allowed_token_ids", "bad_words", "chat_template", "documents")
    + ("grammar", "guided_choice", "guided_grammar", "guided_json")
    + ("guided_regex", "json_schema", "logits_processors", "media_io_kwargs")
    + ("mm_processor_kwargs", "n_predict", "prompt_embeds", "prompt_logprobs", "reasoning_effort")
    + ("structured_outputs", "thinking_token_budget", "truncate_prompt_tokens", "vllm_xargs")
    + ("lora", "n_probs", "samplers", "t_max_predict_ms")
    + ("logprob_token_ids", "repetition_detection", "request_id", "truncation_side")
    + ("guided_whitespace_pattern", "whitespace_pattern")
    # From SGLang.
    + ("custom_logit_processor", "custom_params", "ebnf", "input_ids", "lora_path", "regex", "session_params")
    + ("stop_regex",)
)
"""Parameters of this API or others that change the answer. Where they are not supported, they are refused."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,),
    "watermarking": (False,),
    "include_reasoning": (True,),
    "return_selections": (False,),
    "return_quality": (False,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "background": (False,),
    "n": (1,),
    "best_of": (1,),
    "truncation": ("disabled",),
    "tool_calls": ([],),
    "annotations": ([],),
    # Samplers of llama.cpp and details of its answers. Its clients send these parameters even if they are off.
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "mirostat": (0,),
    "post_sampling_probs": (False,),
    "repeat_penalty": (1, 1.0),
    "tfs_z": (1, 1.0),
    "top_n_sigma": (-1, -1.0),
    "typical_p": (1, 1.0),
    "xtc_probability": (0, 0.0),
    # From SGLang.
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
}
"""Unsupported parameters, with their values that have no effect."""

RANGES: dict[str, dict[str, float]] = {
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 100},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "logprobs": {"minimum": -1},
    "top_logprobs": {"minimum": -1},
    "prompt_logprobs": {"minimum": -1},
}
"""Ranges that ``/openapi.json`` shows. ``SamplingParams`` checks them, so that one error names all wrong values. The
engine limits the number of log-probabilities (``--max-logprobs``)."""

logger = logging.getLogger("shadowkv.serve.unknown")  # the name that the log shows


def complete(schema: dict[str, Any]) -> None:
    """pydantic's ``json_schema_extra`` of every body: it adds ranges, null for optional fields, and the parameters that
    are not fields."""
    properties = schema["properties"]
    for name, value in properties.items():
        branches = value.get("anyOf", [value])
        for branch in branches:
            if branch.get("type") in ("integer", "number"):
                branch.update(RANGES.get(name, {}))
        if name not in schema.get("required", ()) and {"type": "null"} not in branches:
            about = {key: value.pop(key) for key in ("title", "default") if key in value}
            properties[name] = {**about, "anyOf": [*branches, {"type": "null"}]}
    for name in sorted(IGNORED - properties.keys()):
        properties[name] = {"description": "Has no effect."}
    for name in sorted(NEUTRAL.keys() - properties.keys()):
        values = NEUTRAL[name]
        unique = [value for index, value in enumerate(values) if value not in values[:index]]
        properties[name] = {"enum": [*unique, None], "description": "Not supported; these values have no effect."}


class Unknown:
    """Names of unknown parameters, such as hints for other servers. Unknown parameters are dropped. Each name is logged
    once, up to ``MAX_UNKNOWN`` names in all.

    Attributes:
        collects: whether names are kept for ``take`` and not logged, as in a process without a log.
    """

    def __init__(self) -> None:
        self.collects = False
        self._lock = Lock()
        self._recorded: set[str] = set()
        self._new: list[str] = []

    def record(self, name: str) -> None:
        """Records that a request has a parameter ``name``."""
        name = name[:MAX_NAME_CHARS]
        with self._lock:
            if name in self._recorded or len(self._recorded) >= MAX_UNKNOWN:
                return
            self._recorded.add(name)
        if self.collects:
            self._new.append(name)
        else:
            logger.warning("requests have the unknown parameter %r, which has no effect (logged once)", name)

    def take(self) -> list[str]:
        """Returns the names that were recorded since the last call. Without ``collects``, there are none."""
        new, self._new = self._new, []
        return new


unknown = Unknown()
