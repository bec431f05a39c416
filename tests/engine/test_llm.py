"""Python's API in vLLM's shape: prompts of every kind, answers, streams, chats, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shadowkv import (
    LLM,
    CompletionOutput,
    RepetitionDetectionParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.request import RequestError
from shadowkv.wording import SettingsError

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny_llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), load_format="dummy", kv="full", max_model_len=512, max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left(tiny_llm: LLM) -> Any:
    yield
    assert not tiny_llm.engine.has_work and not tiny_llm._arrived


def test_every_form_of_a_prompt_is_one_prompt(tiny_llm: LLM) -> None:
    ids = tiny_llm.get_tokenizer().encode("Hi")
    texts, tokens = ["Hi", {"prompt": "Hi"}], [ids, tuple(ids), np.array(ids), {"prompt_token_ids": ids}]
    (wanted,) = tiny_llm.generate("Hi", GREEDY)
    assert wanted.prompt == "Hi" and wanted.prompt_token_ids == ids and wanted.finished
    for form in texts + tokens:
        for prompts in (form, [form]):
            (answer,) = tiny_llm.generate(prompts, GREEDY, use_tqdm=False)
            assert answer.outputs == wanted.outputs and answer.prompt_token_ids == ids
            assert answer.prompt == ("Hi" if any(form is text for text in texts) else None)
    both = tiny_llm.generate(iter(["Hi", ids]), GREEDY)
    assert [answer.outputs for answer in both] == [wanted.outputs] * 2
    assert tiny_llm.generate([], GREEDY) == []


def test_answers_have_the_shape_of_vllm(tiny_llm: LLM) -> None:
    assert SamplingParams().max_tokens == 16
    assert len(tiny_llm.generate("Hi")[0].outputs[0].token_ids) <= 16
    params = SamplingParams(temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs=1, max_tokens=5)
    (answer,) = tiny_llm.generate("Hello", sampling_params=params)
    assert isinstance(answer, RequestOutput) and isinstance(answer.outputs[0], CompletionOutput)
    output = answer.outputs[0]
    assert (output.index, output.finish_reason, output.stop_reason, len(output.token_ids)) == (0, "length", None, 5)
    total = 0.0
    for token, places in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(places)) == token and places[token].rank == 1  # greedy
        assert [place.rank for place in places.values()] == [1, 2]
        assert places[token].decoded_token == tiny_llm.get_tokenizer().decode([token], skip_special_tokens=False)
        total += places[token].logprob
    assert output.cumulative_logprob == pytest.approx(total)
    assert answer.prompt_logprobs[0] is None and len(answer.prompt_logprobs) == len(answer.prompt_token_ids)
    assert all(token in places for token, places in zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:]))
    (plain,) = tiny_llm.generate("Hello", GREEDY)
    assert plain.outputs[0].logprobs is plain.outputs[0].cumulative_logprob is plain.prompt_logprobs is None
    assert tiny_llm.generate("Hello" * 30, GREEDY) and tiny_llm.generate("Hello" * 30, GREEDY)[0].num_cached_tokens > 64


def test_several_answers_and_stop_strings(tiny_llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, ignore_eos=True, max_tokens=8)
    (answer,) = tiny_llm.generate("Hi", params)
    assert [output.index for output in answer.outputs] == [0, 1, 2] and answer.finished
    assert len({tuple(output.token_ids) for output in answer.outputs}) == 3
    (again,) = tiny_llm.generate("Hi", params)
    assert again.outputs == answer.outputs
    (alone,) = tiny_llm.generate("Hi", SamplingParams(seed=5, ignore_eos=True, max_tokens=8))
    assert alone.outputs[0] == answer.outputs[0]
    for stop in ("AA", ["BB", "AA"]):  # a text is no list of letters
        params = SamplingParams(temperature=0, logit_bias={65: 100.0}, stop=stop)
        (output,) = tiny_llm.generate("Hi", params)[0].outputs
        assert (output.text, output.token_ids) == ("", [65, 65])
        assert (output.finish_reason, output.stop_reason) == ("stop", "AA")


def test_streams_add_up_and_may_be_read_side_by_side(tiny_llm: LLM) -> None:
    params = SamplingParams(n=2, seed=1, ignore_eos=True, max_tokens=6, logprobs=0)
    wanted = tiny_llm.generate(["Hi", "Hello"], params)
    texts, ends = {}, {}
    first = tiny_llm.stream("Hi", GREEDY)
    begun = next(first)
    for piece in tiny_llm.stream(["Hi", "Hello"], params):
        (output,) = piece.outputs
        assert not ends.get(piece.request_id), "more after its end"
        texts.setdefault((piece.prompt, output.index), []).append(output)
        ends[piece.request_id] = piece.finished
    assert list(ends.values()) == [True, True]
    for answer in wanted:
        for output in answer.outputs:
            pieces = texts[answer.prompt, output.index]
            assert "".join(piece.text for piece in pieces) == output.text
            assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
            assert [list(step) for piece in pieces for step in piece.logprobs] == [[id] for id in output.token_ids]
            assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    rest = "".join(piece.outputs[0].text for piece in first)
    assert begun.outputs[0].text + rest == tiny_llm.generate("Hi", GREEDY)[0].outputs[0].text


def test_a_stream_that_is_closed_ends_its_requests(tiny_llm: LLM) -> None:
    stream = tiny_llm.stream("Hi", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    assert tiny_llm.engine.has_work
    stream.close()
    assert not tiny_llm.engine.has_work


def test_chats_go_through_the_template(tiny_llm: LLM) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    ids = tiny_llm.get_tokenizer().encode_chat(chat)
    (answer,) = tiny_llm.chat(chat, GREEDY)
    assert answer.prompt_token_ids == ids
    assert answer.outputs == tiny_llm.generate(ids, GREEDY)[0].outputs
    several = tiny_llm.chat([chat, chat], GREEDY)
    assert [one.outputs for one in several] == [answer.outputs] * 2
    (without,) = tiny_llm.chat(chat, GREEDY, add_generation_prompt=False)
    assert without.prompt_token_ids == tiny_llm.get_tokenizer().encode_chat(chat, False)


def test_contents_may_have_parts_and_the_last_may_be_continued(tiny_llm: LLM) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    (answer,) = tiny_llm.chat([{"role": "user", "content": parts}], GREEDY)
    encode = tiny_llm.get_tokenizer().encode_chat
    assert answer.prompt_token_ids == encode([{"role": "user", "content": "H\ni"}])
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    (answer,) = tiny_llm.chat(chat, GREEDY, continue_final_message=True)
    assert answer.prompt_token_ids == encode(chat, False, continue_final_message=True)
    assert tiny_llm.get_tokenizer().decode(answer.prompt_token_ids).endswith("Well")
    for part in ({"type": "image_url", "image_url": {"url": "a"}}, "text", {"type": "text"}):
        with pytest.raises(TypeError, match=r"a part of a content must be .* and is"):
            tiny_llm.chat([{"role": "user", "content": [part]}])


def test_vllms_keywords_are_its_flags(tiny: Path, capsys: Any) -> None:
    fine = {"pipeline_parallel_size": 1, "enable_lora": False, "task": "generate"}
    given = {"trust_remote_code": True, "swap_space": 4, "enable_chunked_prefill": False}
    llm = LLM(str(tiny), load_format="dummy", kv="full", max_model_len=512, max_num_seqs=1, **fine, **given)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert [note.split()[1] for note in notes] == ["--no-enable-chunked-prefill", "--swap-space", "--trust-remote-code"]
    assert llm.generate("Hi", GREEDY, use_tqdm=False, lora_request=None)[0].finished
    with pytest.raises(ValueError, match=r"--enable-lora is not supported: .*--adapter DIR"):
        LLM(str(tiny), enable_lora=True)


@pytest.mark.parametrize(
    "prompts, words",
    [
        (5, "prompts must be a text, a list of token ids"),
        (b"Hi", "prompts must be a text"),
        ([5.5], r"prompts\[0\] must be .* and is 5.5 \(float\)"),
        (["Hi", [1, "a"]], r"prompts\[1\] must be .* and has 'a' \(str\) in it"),
        ({"text": "Hi"}, r"prompts\[0\] must be .* and is an object with 'text'"),
        ({"prompt": "Hi", "multi_modal_data": {}}, "'multi_modal_data'"),
        ({"prompt": [1]}, r"prompts\[0\]\['prompt'\] must be a text"),
        ({"prompt_token_ids": "Hi"}, r"prompts\[0\]\['prompt_token_ids'\] must be token ids"),
    ],
)
def test_what_is_no_prompt(tiny_llm: LLM, prompts: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        tiny_llm.generate(prompts, GREEDY)


def test_wrong_types_name_the_argument(tiny_llm: LLM, tiny: Path) -> None:
    with pytest.raises(TypeError, match=r"sampling_params must be SamplingParams or a list of them, and is .*\(dict\)"):
        tiny_llm.generate("Hi", {"temperature": 0})
    with pytest.raises(ValueError, match="sampling_params has 2 entries for 1 prompt"):
        tiny_llm.generate("Hi", [GREEDY, GREEDY])
    with pytest.raises(TypeError, match="messages must be a list of"):
        tiny_llm.chat("Hi")
    with pytest.raises(
        TypeError, match="max_tokens=True must be int or None, and is bool; temperature='hot' must be float"
    ):
        SamplingParams(max_tokens=True, temperature="hot")
    with pytest.raises(TypeError, match="stop_token_ids=5 must be tuple"):
        SamplingParams(stop_token_ids=5)
    with pytest.raises(ValueError, match=r"stop=.* must be strings, none of them empty"):
        SamplingParams(stop=[1])
    with pytest.raises(TypeError, match=r"LLM has no option swap_spaces; it has .*max_model_len"):
        LLM(str(tiny), swap_spaces=4)
    with pytest.raises(TypeError, match=r"stop_token_ids=\('a',\) must be token ids"):
        SamplingParams(stop_token_ids=["a"])
    for bias in ({"a": 1}, {1: "a"}, {True: 1}):
        with pytest.raises(TypeError, match=r"logit_bias=.* must have token ids as keys, and numbers as values"):
            SamplingParams(logit_bias=bias)
    for chats in ([], [[]], [[{"role": "user", "content": "Hi"}], []]):
        with pytest.raises(ValueError, match="messages must not be empty"):
            tiny_llm.chat(chats)
    for prompt in ("a\ud800b", {"prompt": "a\ud800b"}):
        with pytest.raises(ValueError, match=r"prompts\[0\].* has an unpaired surrogate at index 1"):
            tiny_llm.generate(prompt)
    with pytest.raises(ValueError, match=r"lora_request must be None: .*adapter=DIR"):
        tiny_llm.generate("Hi", lora_request=object())
    with pytest.raises(SettingsError, match="max_model_len='8k' must be int or None, and is str"):
        LLM(str(tiny), max_model_len="8k")
    with pytest.raises(SettingsError, match="enforce_eager=1 must be bool"):
        EngineConfig(enforce_eager=1)
    assert SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(3)).max_tokens == 3


def test_answers_that_follow_vllms_structured_outputs(tiny_llm: LLM) -> None:
    def text(**rules: Any) -> str:
        params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(**rules))
        return tiny_llm.generate("Hi", params)[0].outputs[0].text

    assert text(choice=["yes", "no"]) in ("yes", "no")
    assert text(regex="ab?c{2}") in ("acc", "abcc")
    assert text(grammar='root ::= "left" | "right"') in ("left", "right")
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    for form in (schema, json.dumps(schema)):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json=form, disable_any_whitespace=True))
        assert params.rules == json.dumps(schema) and params.one_line
    assert SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)).rules == '{"type": "object"}'
    with pytest.raises(ValueError, match="regex and choice are given"):
        StructuredOutputsParams(regex="a", choice=["a"])
    with pytest.raises(ValueError, match="none is given"):
        StructuredOutputsParams()
    with pytest.raises(ValueError, match="structured_outputs"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), json_schema="{}")


def test_bad_words_are_not_written(tiny_llm: LLM) -> None:
    always = {65: 90.0, 66: 80.0, 67: 70.0}  # the bytes A, B and C

    def text(words: list[str]) -> str:
        params = SamplingParams(temperature=0, max_tokens=4, logit_bias=always, bad_words=words)
        return tiny_llm.generate("Hi", params)[0].outputs[0].text

    assert (text([]), text(["A"]), text(["A", "B"]), text(["AA"])) == ("AAAA", "BBBB", "CCCC", "ABAB")
    with pytest.raises(ValueError, match="bad_words"):
        SamplingParams(bad_words=[" "])


def test_an_answer_ends_where_it_repeats_itself(tiny_llm: LLM) -> None:
    detection = RepetitionDetectionParams(max_pattern_size=4, min_count=3)
    biased = {"temperature": 0, "logit_bias": {65: 100.0}, "ignore_eos": True, "max_tokens": 20}
    params = SamplingParams(**biased, repetition_detection=detection)
    (output,) = tiny_llm.generate("Hi", params)[0].outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("AAA", "repetition", "repetition_detected")
    later = SamplingParams(**biased, repetition_detection=detection, min_tokens=7)
    assert tiny_llm.generate("Hi", later)[0].outputs[0].text == "AAAAAAA"
    for wrong in ({"max_pattern_size": 2, "min_count": 1}, {"max_pattern_size": 1, "min_pattern_size": 2}):
        with pytest.raises(ValueError, match=r"min_(count|pattern_size)="):
            RepetitionDetectionParams(**wrong)


def test_what_ends_an_answer_may_be_part_of_it(tiny_llm: LLM) -> None:
    biased = {"temperature": 0, "logit_bias": {65: 100.0}}

    def end(**params: Any) -> tuple[str, str | int | None]:
        (output,) = tiny_llm.generate("Hi", SamplingParams(**biased, **params))[0].outputs
        assert output.finish_reason == "stop"
        return output.text, output.stop_reason

    assert end(stop="AA") == ("", "AA") and end(stop="AA", include_stop_str_in_output=True) == ("AA", "AA")
    assert end(stop_token_ids=[65]) == ("", 65)
    assert end(stop_token_ids=[65], include_stop_str_in_output=True) == ("A", 65)


def test_log_probabilities_within_max_logprobs(tiny_llm: LLM) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestError, match=rf"{name}=21 is more than 20 \(--max-logprobs\)"):
            tiny_llm.generate("Hi", SamplingParams(**{name: 21}))
        with pytest.raises(RequestError, match=rf"{name}=-1, all \d+ of the vocabulary, is more than 20"):
            tiny_llm.generate("Hi", SamplingParams(**{name: -1}))
    params = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=[65, 66])
    (output,) = tiny_llm.generate("Hi", params)[0].outputs
    assert {*output.logprobs[0]} == {output.token_ids[0], 65, 66}
    with pytest.raises(RequestError, match="thinking_token_budget needs a model"):
        tiny_llm.generate("Hi", SamplingParams(thinking_token_budget=5))
    assert tiny_llm.generate("Hi", SamplingParams(thinking_token_budget=-1))
