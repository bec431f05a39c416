"""SGLang's ``/generate``, and llama.cpp's ``/completion`` and ``/apply-template``: what their bodies have to be, which
completion they ask for, and what their answers look like."""

from __future__ import annotations

from typing import Any

import httpx

from robustness.judging.rules import (
    MESSAGE,
    TEMPLATE,
    Rule,
    boolean,
    either,
    fields,
    given,
    integer,
    loads,
    number,
    short,
    some,
    text,
    utf8,
)

GENERATE, APPLY_TEMPLATE = "/generate", "/apply-template"
COMPLETION = ("/completion", "/completions")
LLAMA = (*COMPLETION, APPLY_TEMPLATE)
"""Those whose errors have llama.cpp's types."""

ASKS = (GENERATE, *COMPLETION)
"""Those that ask for a completion."""

KINDS = ("invalid_request_error", "not_found_error", "exceed_context_size_error", "unavailable_error", "server_error")
"""llama.cpp's types of errors, but for those of keys."""

NEW_TOKENS = 128
"""Length of an answer of ``/generate`` that names none, as in SGLang."""

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "n",
) + ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "json_schema", "regex", "ebnf")
"""Of ``sampling_params``, what has the same name in a completion."""

SHARED = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "ignore_eos",
    "cache_prompt",
    "presence_penalty",
) + ("frequency_penalty", "grammar", "json_schema", "stream")
"""Of llama.cpp's parameters, what has the same name in a completion."""


def native_rules(sampling: dict[str, Rule], vocab: int) -> dict[str, Rule]:
    """By route, what a body has to be, where ``sampling`` are a completion's parameters."""
    tokens = some(integer(0, vocab - 1), 1)
    seed = integer(-(2**63), 2**63 - 1)
    named = {"model": sampling["model"], "stream": boolean}
    lengths = {"max_new_tokens": integer(0), "min_new_tokens": integer(0), "sampling_seed": seed}
    generate = {
        **named,
        "text": either(utf8, some(utf8, 1, 2048)),
        "input_ids": either(tokens, some(tokens, 1, 2048)),
        "sampling_params": fields({**lengths, **{name: sampling[name] for name in SAMPLING}}),
        "return_logprob": boolean,
        "top_logprobs_num": integer(),
        "logprob_start_len": integer(),
        "rid": short(256),
    }
    mixed = some(either(utf8, integer(0, vocab - 1)), 1, 2048)
    prompt = either(utf8, _is_object_with_text, tokens, lambda value: _is_mixed(value) and mixed(value))
    bias = either(number(-100, 100), lambda value: value is False)
    completion = {
        **named,
        **{name: sampling[name] for name in SHARED},
        "prompt": either(prompt, some(prompt, 1, 2048)),
        "n_predict": integer(-1),
        "n_probs": integer(0, 20),
        "seed": seed,
        "repeat_penalty": number(0, 100, above=0),
        "logit_bias": either(some(_pair(bias), most=1024), _biases(bias)),
        "return_tokens": boolean,
        "timings_per_token": boolean,
        "return_progress": boolean,
        "response_fields": some(short(256), most=64),
    }
    template = {"model": named["model"], **TEMPLATE, "messages": some(MESSAGE, 1)}
    return {
        GENERATE: fields(generate),
        **dict.fromkeys(COMPLETION, fields(completion, "prompt")),
        APPLY_TEMPLATE: fields(template, "messages"),
    }


def _is_mixed(value: Any) -> bool:
    """Whether it is one prompt, of texts among token ids."""
    return isinstance(value, list) and set(map(type, value)) == {int, str}


def _is_object_with_text(value: Any) -> bool:
    return isinstance(value, dict) and utf8(value.get("prompt_string")) and not value.get("multimodal_data")


def _pair(bias: Rule) -> Rule:
    return lambda pair: (
        isinstance(pair, list) and len(pair) == 2 and (type(pair[0]) is int or text(pair[0])) and bias(pair[1])
    )


def _biases(bias: Rule) -> Rule:
    return lambda value: isinstance(value, dict) and len(value) <= 1024 and all(map(bias, value.values()))


def as_completion(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body of a completion that asks for the same as far as contradictions go."""
    if path == GENERATE:
        sampling = dict(given(body.get("sampling_params", {})))
        lengths = {"max_tokens": sampling.get("max_new_tokens", NEW_TOKENS)}
        if "min_new_tokens" in sampling:
            lengths["min_tokens"] = sampling["min_new_tokens"]
        prompt = body["text"] if "text" in body else body["input_ids"]
        return {"prompt": prompt, **lengths, **{name: sampling[name] for name in SAMPLING if name in sampling}}
    shared = {name: body[name] for name in SHARED if name in body}
    limit = {} if body.get("n_predict", -1) == -1 else {"max_tokens": body["n_predict"]}
    prompts = body["prompt"]
    is_list = isinstance(prompts, list) and not _is_mixed(prompts)
    prompts = [*map(_text, prompts)] if is_list else _text(prompts)
    return {"prompt": prompts, **limit, **shared}


def _text(prompt: Any) -> Any:
    if _is_mixed(prompt):  # as many tokens in a text
        return "".join(piece if isinstance(piece, str) else "a" for piece in prompt)
    return prompt["prompt_string"] if isinstance(prompt, dict) else prompt


def ill_formed_native(path: str, body: dict[str, Any], response: httpx.Response) -> str | None:
    """What is wrong with an answer, if anything; may raise ValueError, KeyError or TypeError, too."""
    if path == APPLY_TEMPLATE:
        return None if text(loads(response.content)["prompt"]) else "no prompt"
    if not body.get("stream"):
        found = loads(response.content)
        answers = found if isinstance(found, list) else [found]
    else:
        answers = [loads(line.removeprefix("data: ").encode()) for line in _lines(path, response.text)]
        failed = next((answer["error"] for answer in answers if "error" in answer), None)
        if failed is not None:
            return None if failed["message"].endswith("try again later") else f"a stream that failed: {failed}"
    if path == GENERATE:
        ends = [answer["meta_info"]["finish_reason"] for answer in answers if text(answer["text"])]
        if not body.get("stream"):
            return None if ends and all(end["type"] in ("stop", "length") for end in ends) else "no end"
        return None if ends and ends[-1]["type"] in ("stop", "length") else "a stream without its end"
    if body.get("response_fields"):
        return None
    last = answers[-1]
    fine = last["stop"] is True and last["stop_type"] in ("eos", "word", "limit") and text(last["content"])
    return None if fine and last["timings"]["predicted_n"] == last["tokens_predicted"] else "no end"


def _lines(path: str, content: str) -> list[str]:
    lines = [line for line in content.split("\n\n") if line and not line.startswith(":")]
    if path == GENERATE and lines.pop() != "data: [DONE]":
        raise ValueError("the stream ended without [DONE]")
    return lines
