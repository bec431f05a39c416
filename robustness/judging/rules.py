"""What bodies have to be, by the documents of the APIs: rules for values, lists and objects, which fields have no
effect, and the bodies of chats, responses and messages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

Rule = Callable[[Any], bool]


def boolean(value: Any) -> bool:
    return isinstance(value, bool)


def text(value: Any) -> bool:
    return isinstance(value, str)


def utf8(value: Any) -> bool:
    """A text without half of a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def integer(low: float = -math.inf, high: float = math.inf) -> Rule:
    return lambda value: type(value) is int and low <= value <= high


def number(low: float, high: float, above: float = -math.inf) -> Rule:
    return lambda value: type(value) in (int, float) and low <= value <= high and value > above


def some(rule: Rule, least: int = 0, most: float = math.inf) -> Rule:
    """A list of ``least`` to ``most`` items."""
    return lambda value: isinstance(value, list) and least <= len(value) <= most and all(map(rule, value))


def short(most: int, least: int = 0) -> Rule:
    """A text of ``least`` to ``most`` characters."""
    return lambda value: isinstance(value, str) and least <= len(value) <= most


def save_name(value: Any) -> bool:
    """A name to save as."""
    allowed = {*"._-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"}
    return isinstance(value, str) and 1 <= len(value) <= 64 and {*value} <= allowed


def snapshot_name(value: Any) -> bool:
    """A snapshot's name."""
    return isinstance(value, str) and len(value) == 40 and {*value} <= {*"0123456789abcdef"}


def either(*rules: Rule) -> Rule:
    return lambda value: any(rule(value) for rule in rules)


def fields(rules: dict[str, Rule], *required: str) -> Rule:
    """An object whose fields follow the rules; null is the same as omitted."""

    def check(value: Any) -> bool:
        if not isinstance(value, dict) or any(value.get(name) is None for name in required):
            return False
        return all(harmless(*item) if item[0] not in rules else rules[item[0]](item[1]) for item in given(value))

    return check


def given(value: dict[str, Any]) -> list[tuple[str, Any]]:
    return [item for item in value.items() if item[1] is not None]


def harmless(name: str, value: Any) -> bool:
    """Whether an unsupported parameter has no effect: an unknown one is a hint for other servers."""
    neutral = [value == other and type(value) is type(other) for other in NEUTRAL.get(name, ())]
    return name in WITHOUT_EFFECT or any(neutral) or (name not in NEUTRAL and name not in WITH_EFFECT)


# Deliberately not those of shadowkv/serve/bodies/parameters.py: a list that is wrong there must differ from this one.
WITHOUT_EFFECT = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    + ("prediction", "include_obfuscation", "verbosity")
    + ("session_id", "stream_interval", "ec_transfer_params", "mm_payload", "return_mm_kwargs")
)
WITH_EFFECT = frozenset(
    ("grammar", "structured_outputs", "guided_json", "bad_words", "audio", "web_search_options", "mcp_servers")
    + ("truncate_prompt_tokens", "logits_processors", "previous_response_id", "conversation", "max_tokens")
    + ("allowed_token_ids", "logprob_token_ids", "repetition_detection", "request_id", "truncation_side")
    + ("chat_template", "prompt_logprobs", "thinking_token_budget", "whitespace_pattern", "guided_whitespace_pattern")
    + ("regex", "ebnf", "stop_regex", "json_schema", "input_ids", "lora_path", "samplers")
)
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
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "background": (False,),
    "n": (1,),
    "best_of": (1,),
    "truncation": ("disabled",),
    "tool_calls": ([],),
    "annotations": ([],),
}


def schema(value: Any) -> bool:
    types = {"string", "number", "integer", "boolean", "array", "object", "null"}
    known = either(lambda kind: text(kind) and kind in types, some(lambda kind: text(kind) and kind in types))
    return isinstance(value, dict) and ("type" not in value or known(value["type"]))


FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def response_format(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("type") not in FORMATS:
        return False
    schemas = [value[name] for name in ("json_schema", "schema") if value.get(name) is not None]
    if value["type"] not in ("json_object", "json_schema") or (value["type"] == "json_object" and not schemas):
        return True
    named = {"schema": value["schema"]} if value.get("schema") is not None else value.get("json_schema")
    return len(schemas) == 1 and isinstance(named, dict) and schema(named.get("schema"))


def json_object(value: Any) -> bool:
    """JSON text of an object; an empty text counts as one without arguments."""
    try:
        return not value.strip() or isinstance(loads(value.encode()), dict)
    except (AttributeError, ValueError, RecursionError):
        return False


def tool_choice(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("none", "auto", "required")
    return isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict)


function = fields({"name": short(256, least=1), "description": utf8, "parameters": schema, "strict": boolean}, "name")
tool = fields({"type": lambda kind: kind == "function", "function": function}, "type", "function")
tool_call = fields(
    {
        "id": short(256),
        "type": lambda kind: kind == "function",
        "function": fields({"name": short(256), "arguments": json_object}, "name", "arguments"),
    },
    "id",
    "function",
)


def loads(raw: bytes) -> Any:
    """JSON, without the NaN and Infinity that Python accepts."""
    return json.loads(raw, parse_constant=_refuse)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# -- completions and chats ---------------------------------------------------------------------------------------------

SOURCE = {"filename": short(256), "file_data": utf8, "file_id": short(256)}
PART = either(
    fields({"type": lambda kind: kind == "text", "text": utf8}, "type", "text"),
    fields({"type": lambda kind: kind == "file", "file": fields(SOURCE)}, "type", "file"),
)
MESSAGE = fields(
    {
        "role": short(256, least=1),
        "content": either(utf8, some(PART)),
        "name": short(256),
        "tool_calls": some(tool_call),
        "tool_call_id": short(256),
        "reasoning_content": utf8,
        "reasoning": utf8,
    },
    "role",
)
TEMPLATE = {
    "tools": some(tool),
    "chat_template_kwargs": lambda value: isinstance(value, dict),
    "add_generation_prompt": boolean,
    "continue_final_message": boolean,
}


def structured(value: Any) -> bool:
    """``structured_outputs``: one kind of rules."""
    if not isinstance(value, dict):
        return False
    kinds = [name for name, rules in given(value) if name in KINDS_OF_RULES and (name != "json_object" or rules)]
    return len(kinds) == 1 and KINDS_OF_RULES[kinds[0]](value[kinds[0]])


rules_text = short(2**17, least=1)
schema_or_text = either(schema, rules_text)
KINDS_OF_RULES: dict[str, Rule] = {
    "json": schema_or_text,
    "regex": rules_text,
    "choice": some(rules_text, 1, 4096),
    "grammar": rules_text,
    "json_object": boolean,
    "structural_tag": either(rules_text, lambda value: isinstance(value, dict)),
}
OTHER_NAMES = {
    **{f"guided_{name}": KINDS_OF_RULES[name] for name in ("json", "regex", "choice", "grammar")},
    **{"regex": rules_text, "ebnf": rules_text, "grammar": rules_text, "json_schema": schema_or_text},
}
"""Of ``structured_outputs``, in bodies themselves."""


def shared_rules(model: str, vocab: int) -> dict[str, Rule]:
    """Parameters of every endpoint that generates, of a model of ``vocab`` tokens."""
    token, named = integer(0, vocab - 1), {str(token) for token in range(vocab)}
    return {
        "model": lambda name: name == model,
        "min_tokens": integer(0),
        "temperature": number(0, 100),
        "top_p": number(0, 1, above=0),
        "top_k": integer(-1),
        "min_p": number(0, 1),
        "repetition_penalty": number(0, 100, above=0),
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "logit_bias": lambda bias: (
            isinstance(bias, dict)
            and len(bias) <= 1024
            and {*bias} <= named
            and all(map(number(-100, 100), bias.values()))
        ),
        "stop_token_ids": some(token, most=1024),
        "ignore_eos": boolean,
        "cache_prompt": boolean,
        "cache_salt": short(256, least=1),
        "seed": integer(-(2**63), 2**63 - 1),
        "stream": boolean,
    }


def sampling_rules(shared: dict[str, Rule], vocab: int) -> dict[str, Rule]:
    """Those and the parameters of completions and chats."""
    token = integer(0, vocab - 1)
    return {
        **shared,
        "n": integer(1, 128),
        "best_of": integer(1, 128),
        "max_tokens": integer(0),
        "n_predict": integer(-1),
        "stop": either(short(1024, least=1), some(short(1024, least=1), most=64)),
        "response_format": response_format,
        "structured_outputs": structured,
        **OTHER_NAMES,
        "stream_options": fields({"include_usage": boolean, "continuous_usage_stats": boolean}),
        "request_id": short(256),
        "allowed_token_ids": some(token, 1),
        "bad_words": some(lambda word: short(256, 1)(word) and bool(word.strip()), most=256),
        "repetition_detection": fields(
            dict.fromkeys(("max_pattern_size", "min_pattern_size"), integer(0, 4096)) | {"min_count": integer()}
        ),
        "include_stop_str_in_output": boolean,
        "skip_special_tokens": boolean,
        "add_special_tokens": boolean,
        "truncate_prompt_tokens": integer(-1, 2**21),
        "truncation_side": lambda side: side in ("left", "right"),
        "prompt_logprobs": integer(0, 20),
        "logprob_token_ids": some(token, most=128),
        "return_token_ids": boolean,
        "return_tokens_as_token_ids": boolean,
        "thinking_token_budget": integer(-1, -1),
        "echo": boolean,
        "return_selections": boolean,
        "return_progress": boolean,
        "timings_per_token": boolean,
        "kv_transfer_params": fields(
            {
                "prompt_token_ids": some(token),
                "do_remote_decode": boolean,
                "do_remote_prefill": boolean,
                "remote_snapshots": some(snapshot_name, most=4096),
            }
        ),
    }


# -- responses and messages --------------------------------------------------------------------------------------------


def one_of(*values: Any) -> Rule:
    return lambda value: value in values


def anything(value: Any) -> bool:
    return True


STATUS = one_of("in_progress", "completed", "incomplete")
EFFORT = one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")


def metadata(value: Any) -> bool:
    """Up to 16 pairs of texts."""
    return isinstance(value, dict) and len(value) <= 16 and all(map(short(512), value.values()))


def text_format(value: Any) -> bool:
    """``text.format``: a schema only counts where it is one that is to be followed."""
    if not isinstance(value, dict) or value.get("type", "text") not in (None, *FORMATS[:3]):
        return False
    return value.get("type") != "json_schema" or schema(value.get("schema"))


def responses_body(sampling: dict[str, Rule]) -> Rule:
    """Body of ``/v1/responses``."""
    part = either(
        fields({"type": one_of("input_text", "output_text", "text"), "text": utf8, "annotations": anything}, "text"),
        fields({"type": one_of("input_file"), **SOURCE}, "type"),
    )
    said = either(utf8, some(part))
    item = either(
        fields(
            {
                "type": one_of("message"),
                "role": one_of("system", "developer", "user", "assistant"),
                "content": said,
                "id": short(256),
                "status": STATUS,
                "phase": one_of("commentary", "final_answer"),
            },
            "role",
            "content",
        ),
        fields(
            {
                "type": one_of("function_call"),
                "call_id": short(256),
                "name": short(256),
                "namespace": short(256),
                "arguments": json_object,
            },
            *("type", "call_id", "name", "arguments"),
        ),
        fields({"type": one_of("function_call_output"), "call_id": short(256), "output": said}, "call_id", "output"),
        fields({"type": one_of("reasoning"), "content": anything, "summary": anything}, "type"),
    )
    function = fields({"type": one_of("function"), "name": short(256, least=1), "parameters": schema}, "type", "name")
    namespace = {"type": one_of("namespace"), "name": short(256, least=1), "tools": some(function, 1)}
    return fields(
        {
            **sampling,
            "input": either(utf8, some(item, 1)),
            "instructions": utf8,
            "max_output_tokens": integer(1),
            "stop": either(short(1024, least=1), some(short(1024, least=1), most=64)),
            "text": fields({"format": text_format, "verbosity": one_of("low", "medium", "high")}),
            "tools": some(either(function, fields(namespace, *namespace))),
            "tool_choice": either(
                one_of("none", "auto", "required"), fields({"type": one_of("function"), "name": short(256)}, "name")
            ),
            "parallel_tool_calls": boolean,
            "reasoning": fields({"effort": EFFORT, "summary": one_of("auto", "concise", "detailed")}),
            "metadata": metadata,
            "include": some(one_of("reasoning.encrypted_content", "message.output_text.logprobs")),
            "store": boolean,
            "background": boolean,
            "return_progress": boolean,
            "timings_per_token": boolean,
            "enable_response_messages": boolean,
            "max_tool_calls": integer(1),
            "top_logprobs": integer(0, 20),
            "safety_identifier": short(256),
            "prompt_cache_key": short(256),
            "previous_response_id": short(256),
        },
        "input",
    )


def prompt_rules() -> dict[str, Rule]:
    """Rules for both routes of ``/v1/messages``."""
    part = fields({"type": one_of("text"), "text": utf8, "citations": anything}, "type", "text")
    source = either(
        fields({"type": one_of("base64"), "media_type": one_of("application/pdf"), "data": utf8}, "type", "data"),
        fields({"type": one_of("text"), "media_type": one_of("text/plain"), "data": utf8}, "type", "data"),
        fields({"type": one_of("content"), "content": either(utf8, some(part))}, "type", "content"),
        fields({"type": one_of("file"), "file_id": short(256)}, "type", "file_id"),
    )
    document = fields(
        {"type": one_of("document"), "source": source, "title": utf8, "context": utf8, "citations": anything},
        *("type", "source"),
    )
    block = either(
        *(part, document),
        fields(
            {"type": one_of("tool_use"), "input": lambda value: isinstance(value, dict)}, "type", "id", "name", "input"
        ),
        fields(
            {"type": one_of("tool_result"), "content": either(utf8, some(either(part, document)))},
            *("type", "tool_use_id"),
        ),
        fields({"type": one_of("thinking"), "thinking": utf8}, "type", "thinking"),
        fields({"type": one_of("redacted_thinking"), "data": utf8}, "type", "data"),
    )
    message = fields({"role": one_of("user", "assistant"), "content": either(utf8, some(block))}, "role", "content")
    tool = fields(
        {"name": short(256, least=1), "input_schema": schema, "type": one_of("custom")}, "name", "input_schema"
    )
    return {
        "messages": some(message, 1),
        "system": either(utf8, some(part)),
        "tools": some(tool),
        "tool_choice": fields(
            {
                "type": one_of("auto", "any", "tool", "none"),
                "name": short(256, least=1),
                "disable_parallel_tool_use": boolean,
            },
            "type",
        ),
        "thinking": fields({"type": one_of("enabled", "adaptive", "disabled"), "budget_tokens": integer(1)}, "type"),
        "output_config": fields(
            {"format": fields({"type": one_of("json_schema"), "schema": schema}, "type", "schema"), "effort": EFFORT}
        ),
        "chat_template_kwargs": lambda value: isinstance(value, dict),
    }


def messages_body(sampling: dict[str, Rule]) -> Rule:
    """Body of ``/v1/messages``."""
    stops = some(short(1024, least=1), most=64)
    rules = {**sampling, **prompt_rules(), "max_tokens": integer(1), "stop_sequences": stops}
    return fields(rules, "messages", "max_tokens")


def message_requests(value: Any) -> bool:
    """Requests of a batch of messages, whose bodies are looked at later."""
    one = fields(
        {"custom_id": short(64, least=1), "params": lambda params: isinstance(params, dict)}, "custom_id", "params"
    )
    return some(one, 1, 10_000)(value) and len({request["custom_id"] for request in value}) == len(value)


CHAT_BATCH, INVOCATIONS = "/v1/chat/completions/batch", "/invocations"
COUNT_CHAT = "/v1/chat/completions/input_tokens"


OF_COUNTS = {"model", "messages", *TEMPLATE}
"""What of a chat its number of tokens depends on."""


def chat_rules(sampling: dict[str, Rule]) -> dict[str, Rule]:
    """Parameters of a chat, where ``sampling`` are those that a completion has, too."""
    return {
        **sampling,
        **TEMPLATE,
        "messages": some(MESSAGE, 1),
        "tool_choice": tool_choice,
        "parallel_tool_calls": boolean,
        "max_completion_tokens": integer(1),
        "parse_special": boolean,
        "logprobs": boolean,
        "top_logprobs": integer(0, 20),
        "include_reasoning": boolean,
        "verbose": boolean,
        "verbosity": one_of("medium"),
    }


def route_rules(model: str, vocab: int) -> dict[str, Rule]:
    """By route, what a body has to be, parameter by parameter."""
    shared = shared_rules(model, vocab)
    named, sampling, token = {"model": shared["model"]}, sampling_rules(shared, vocab), integer(0, vocab - 1)
    tokens = some(token, 1)
    prompt = either(utf8, tokens, some(either(utf8, tokens), 1, 2048))
    chat = chat_rules(sampling)
    whole = {"n": integer(1, 1), "stream": lambda value: value is False, "tools": lambda value: value == []}
    return {
        "/v1/completions": fields({**sampling, "prompt": prompt, "logprobs": integer(0, 20)}, "prompt"),
        "/v1/chat/completions": fields(chat, "messages"),
        CHAT_BATCH: fields({**chat, **whole, "messages": some(some(MESSAGE, 1), 1, 2048)}, "messages"),
        INVOCATIONS: anything,  # the judge knows which of the two it is
        COUNT_CHAT: fields(
            {
                **named,
                **TEMPLATE,
                "messages": chat["messages"],
                **{name: anything for name in chat if name not in OF_COUNTS},
            },
            "messages",
        ),
        "/v1/responses": responses_body(shared),
        "/v1/messages": messages_body(shared),
        "/v1/messages/count_tokens": fields(
            {
                **named,
                **prompt_rules(),
                "output_config": lambda value: isinstance(value, dict),  # a schema is not followed
                **{name: anything for name in shared if name not in named},
            },
            "messages",
        ),
        "/v1/messages/batches": fields({"requests": message_requests}, "requests"),
        "/v1/batches": fields(
            {
                "input_file_id": short(256),
                "endpoint": one_of("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
                "completion_window": one_of("24h"),
                "metadata": metadata,
            },
            *("input_file_id", "endpoint"),
        ),
        "/tokenize": fields(
            {
                **named,
                **TEMPLATE,
                "prompt": utf8,
                "content": utf8,
                "messages": some(MESSAGE),
                "add_special_tokens": boolean,
                "add_special": boolean,
                "with_pieces": boolean,
                "parse_special": boolean,
                "return_token_strs": boolean,
            }
        ),
        "/detokenize": fields({**named, "tokens": some(token)}, "tokens"),
        "/cache/save": fields(
            {
                **named,
                **TEMPLATE,
                "name": save_name,
                "prompt": either(utf8, tokens, some(either(utf8, tokens), 1, 1)),
                "messages": some(MESSAGE, 1),
                "add_special_tokens": boolean,
                "parse_special": boolean,
                "cache_salt": short(256, least=1),
            },
            "name",
        ),
        "/cache/restore": fields({**named, "name": save_name}, "name"),
    }
