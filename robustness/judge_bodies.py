"""Parameters that endpoints of completions and chats share, each with its rule."""

from __future__ import annotations

from robustness.judge_rules import (
    Rule,
    boolean,
    either,
    fields,
    integer,
    number,
    response_format,
    short,
    snapshot_name,
    some,
    tool,
    tool_call,
    utf8,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
PART = fields({"type": lambda kind: kind == "text", "text": utf8}, "type", "text")
MESSAGE = fields(
    {
        "role": lambda role: role in ROLES,
        "content": either(utf8, some(PART)),
        "name": short(256),
        "tool_calls": some(tool_call),
        "tool_call_id": short(256),
        "reasoning_content": utf8,
    },
    "role",
)
TEMPLATE = {"tools": some(tool), "chat_template_kwargs": lambda value: isinstance(value, dict)}


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


def sampling_rules(shared: dict[str, Rule]) -> dict[str, Rule]:
    """Those and the parameters of completions and chats."""
    return {
        **shared,
        "n": integer(1, 128),
        "best_of": integer(1, 128),
        "max_tokens": integer(0),
        "stop": either(short(1024, least=1), some(short(1024, least=1), most=64)),
        "response_format": response_format,
        "stream_options": fields({"include_usage": boolean}),
        "return_selections": boolean,
        "kv_transfer_params": fields(
            {
                "do_remote_decode": boolean,
                "do_remote_prefill": boolean,
                "remote_snapshots": some(snapshot_name, most=4096),
            }
        ),
    }
