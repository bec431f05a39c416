"""A tokeniser that is corrupt or belongs to another model ends in one line with its file's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_files import Serve, assert_refused, edit_json, write_directory

from shadowkv import LLM, SamplingParams
from shadowkv.engine.request import RequestError
from shadowkv.models.tokenization.tokenizer_files import library_errors

TOKENIZER, CONFIGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "tiny")


def part(name: str, **changes: Any) -> Callable[[bytes], bytes]:
    """Changes of a part of the file."""

    def change(content: bytes) -> bytes:
        tokenizer = json.loads(content)
        tokenizer[name] = {**(tokenizer[name] or {}), **changes}
        return json.dumps(tokenizer).encode()

    return change


def whole(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps({**json.loads(content), **changes}).encode()


TOKEN = {"id": 500, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda content: b"",
    "truncated": lambda content: content[:-20],
    "no JSON": lambda content: b"tokens",
    "a list": lambda content: b"[]",
    "null": lambda content: b"null",
    "an empty object": lambda content: b"{}",
    "no UTF-8": lambda content: b'{"a": "\xff"}',
    "100,000 deep": lambda content: b'{"model":' * 100_000,
    "a version that is a number": whole(version=3),
    "no model": whole(model=None),
    "model that is a text": whole(model="BPE"),
    "unknown model": part("model", type="Klingon"),
    "vocabulary that is a list": part("model", vocab=["a"]),
    "negative id": part("model", vocab={"a": -1}),
    "id that is a text": part("model", vocab={"a": "1"}),
    "id past the vocabulary": part("model", vocab={"a": 0, "b": 96}),
    "id 2^32 - 1": part("model", vocab={"a": 0, "b": 2**32 - 1}),
    "id 2^40": part("model", vocab={"a": 2**40}),
    "merges of unknown tokens": part("model", merges=["qq zz"]),
    "merges that are numbers": part("model", merges=[3]),
    "a prefix that makes the library panic": part("model", merges=["A B"], continuing_subword_prefix="###"),
    "added tokens that are texts": whole(added_tokens=["<x>"]),
    "normaliser of no kind": whole(normalizer={"type": "Klingon"}),
    "splits on no regular expression": whole(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CONTENTS)
def test_a_corrupt_tokeniser_is_refused(name: str, model: Path, serve: Serve) -> None:
    file = model / TOKENIZER
    file.write_bytes(CONTENTS[name](file.read_bytes()))
    assert_refused(serve(model), TOKENIZER)


def test_added_tokens_beyond_the_embedding_are_warned_of(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, names = model / TOKENIZER, ["<0>", "[PAD]", "[EOS]"]
    tokens = [{**TOKEN, "id": 95 + i, "content": name, "special": True} for i, name in enumerate(names)]
    vocab = {chr(ord(" ") + index): index for index in range(95)}
    file.write_bytes(whole(added_tokens=tokens)(part("model", vocab=vocab)(file.read_bytes())))
    edit_json(model / CONFIGS, eos_token="[EOS]")
    llm = LLM(model=str(model), device="cpu", max_model_len=64)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"{file}: 2 added tokens are beyond the model's vocabulary of 96")
    assert warning.endswith("'[PAD]', '[EOS]'")
    with pytest.raises(RequestError, match="token id 96 is not in this model's vocabulary of 96"):
        llm.generate(["A[PAD]"])
    (answer,) = llm.generate(["A<0>"], SamplingParams(max_tokens=3, min_tokens=2))
    assert 2 <= len(answer.outputs[0].token_ids) <= 3


FIELDS: list[tuple[str, Any]] = [
    *(("eos_token", value) for value in (3, ["</s>"], True, {}, {"content": 3}, {"text": "</s>"})),
    *(("bos_token", value) for value in (3.5, [])),
    *(("add_bos_token", value) for value in ("yes", 1, [])),
    *(("add_eos_token", value) for value in ("no", {})),
    *(("chat_template", value) for value in (3, {}, True, [3], [{"name": "default"}], [{"name": 1, "template": 2}])),
    *(("chat_template", value) for value in ("{% if %}", "{{", "{% for x in y %}", "{% endfor %}", "{{ x|klingon }}")),
    ("chat_template", [{"name": "default", "template": "{% if %}"}]),
    ("chat_template", "{{ " + "(" * 50_000 + ")" * 50_000 + " }}"),
    ("chat_template", "{% for x in y %}" * 50 + "{% endfor %}" * 50),
    ("chat_template", "{% if x %}" * 5000 + "{% endif %}" * 5000),
    ("chat_template", "{{ 0" + "+ 1" * 50_000 + " }}"),
]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("key", "value"), FIELDS, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_named(key: str, value: Any, model: Path, serve: Serve) -> None:
    edit_json(model / CONFIGS, **{key: value})
    assert_refused(serve(model), CONFIGS, key.replace("_", " ") if isinstance(value, str) and key[0] == "c" else "")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("content", [b"{% if %}", b"\xff\xfe", b"{{ 'a'", b" " * (80 << 20)], ids=lambda c: str(c[:9]))
def test_a_bad_template_file_is_refused(content: bytes, model: Path, serve: Serve) -> None:
    (model / TEMPLATE).write_bytes(content)
    assert_refused(serve(model), TEMPLATE)


def test_a_directory_in_place_of_a_template(model: Path, serve: Serve) -> None:
    (model / TEMPLATE).mkdir()
    assert_refused(serve(model), TEMPLATE)


@pytest.mark.parametrize("error", [KeyError("ours"), TypeError("ours"), OSError("ours")], ids=repr)
def test_only_the_librarys_own_errors_are_taken_for_refusals(error: Exception) -> None:
    with pytest.raises(type(error), match="ours"), library_errors("the tokeniser"):
        raise error
    refused = "the tokeniser is refused by the tokenizers library: theirs"
    with pytest.raises(ValueError, match=refused), library_errors("the tokeniser"):
        raise Exception("theirs")


TENFOLD = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
EMPTY = {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "y" * 100}
GROWING: dict[str, Any] = {
    "nine replacements": {"type": "Sequence", "normalizers": [TENFOLD] * 9},
    "a sequence in a sequence": {
        "type": "Sequence",
        "normalizers": [{"type": "Sequence", "normalizers": [TENFOLD]}, TENFOLD],
    },
    "of nothing": EMPTY,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", GROWING)
def test_a_normaliser_that_multiplies_texts_is_refused(name: str, model: Path, serve: Serve) -> None:
    file = model / TOKENIZER
    file.write_bytes(whole(normalizer=GROWING[name])(file.read_bytes()))
    assert_refused(serve(model), TOKENIZER, "times as long")


@pytest.mark.timeout(60)
def test_a_decoder_that_multiplies_texts_is_refused(model: Path, serve: Serve) -> None:
    file = model / TOKENIZER
    file.write_bytes(whole(decoder={"type": "Sequence", "decoders": [TENFOLD] * 2})(file.read_bytes()))
    assert_refused(serve(model), TOKENIZER, "its decoder can make a text 100 times as long")


def test_a_normaliser_that_lengthens_texts_a_little_is_taken(model: Path) -> None:
    steps = [
        {"type": "Prepend", "prepend": "_"},
        TENFOLD,
        {"type": "Replace", "pattern": {"Regex": " +"}, "content": "_"},
    ]
    file = model / TOKENIZER
    file.write_bytes(whole(normalizer={"type": "Sequence", "normalizers": steps})(file.read_bytes()))
    assert LLM(model=str(model), device="cpu", max_model_len=64).get_tokenizer().encode("a b")
