"""A GGUF file that is corrupt or lies ends in one line with its name, whatever its header claims."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_files import HIDDEN, Serve, assert_refused
from gguf import GGUFValueType as Kind
from raw_gguf import RawGGUF, array, good_file, scalar

from shadowkv.engine.llm import LLM
from shadowkv.models import load_config

EMBEDDING = "token_embd.weight"


def lying_text(length: int) -> tuple[Kind, bytes]:
    return Kind.STRING, struct.pack("<Q", length) + b"abc"


def field(key: str, kind: Kind, value: object) -> Callable[[RawGGUF], None]:
    return lambda file: file.set(key, kind, value)


def raw(key: str, value: tuple[Kind, bytes]) -> Callable[[RawGGUF], None]:
    return lambda file: file.fields.update({key: value})


def tensor(name: str = EMBEDDING, **changes: object) -> Callable[[RawGGUF], None]:
    return lambda file: vars(file.tensors[name]).update(changes)


def file(**changes: object) -> Callable[[RawGGUF], None]:
    return lambda file: vars(file).update(changes)


def without(key: str) -> Callable[[RawGGUF], object]:
    return lambda file: file.fields.pop(key)


def scores(values: list[float]) -> Callable[[RawGGUF], None]:
    def change(file: RawGGUF) -> None:
        file.set("tokenizer.ggml.model", Kind.STRING, "llama")
        file.fields["tokenizer.ggml.scores"] = array(Kind.FLOAT32, values)

    return change


HUGE, TOKENS = 1 << 60, "tokenizer.ggml.tokens"
LETTERS = [f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(96)]

STRUCTURE: dict[str, tuple[Callable[[RawGGUF], object], str]] = {
    "wrong magic": (file(magic=b"GGML"), "magic"),
    "version 1": (file(version=1), "version 1"),
    "version 99": (file(version=99), "version 99"),
    "big-endian": (file(version=3 << 24), "big-endian"),
    "field count 2^60": (file(stated_fields=HUGE), ""),
    "tensor count 2^60": (file(stated_tensors=HUGE), ""),
    "fewer fields than there are": (file(stated_fields=3), ""),
    "array length 2^60": (raw("x", array(Kind.UINT8, [1], HUGE)), "x"),
    "array of texts, length 2^60": (raw("x", array(Kind.STRING, ["a"], HUGE)), "x"),
    "array length past the end": (raw("x", array(Kind.UINT64, [1], 1 << 20)), "x"),
    "array of arrays": (raw("x", (Kind.ARRAY, struct.pack("<IQ", Kind.ARRAY, 1) * 100_000)), "x"),
    "array of an unknown type": (raw("x", (Kind.ARRAY, struct.pack("<IQ", 77, 1))), "x"),
    "text length 2^62": (raw("x", lying_text(1 << 62)), "x"),
    "text length 2^64 - 1": (raw("x", lying_text((1 << 64) - 1)), "x"),
    "field of an unknown type": (lambda f: f.fields.update(x=(99, b"")), "99"),
    "text that is no UTF-8": (field("x", Kind.STRING, b"\xff\xfe"), "UTF-8"),
    "a field twice": (file(doubled_field="llama.block_count"), "llama.block_count"),
    "a tensor twice": (file(doubled_tensor=EMBEDDING), EMBEDDING),
    "tensor past the end": (tensor(offset=1 << 40), EMBEDDING),
    "tensor offset 2^64 - 32": (tensor(offset=(1 << 64) - 32), EMBEDDING),
    "unaligned tensor": (tensor(offset=4), EMBEDDING),
    "overlapping tensors": (tensor("output.weight", offset=32), "output.weight"),
    "unknown tensor type": (tensor(kind=999), EMBEDDING),
    "tensor type that is not decoded": (tensor("output_norm.weight", kind=24), "output_norm.weight"),
    "zero dimension": (tensor(dims=[HIDDEN, 0]), EMBEDDING),
    "no dimensions": (tensor(dims=[]), EMBEDDING),
    "thousand dimensions": (tensor(dims=[1] * 1000), EMBEDDING),
    "dimensions whose product is 2^64": (tensor(dims=[1 << 32, 1 << 32]), EMBEDDING),
    "dimensions whose product is 2^66 + 32": (tensor(dims=[(1 << 61) + 1, 32]), EMBEDDING),
    "dimension 2^63": (tensor(dims=[1 << 63, 2]), EMBEDDING),
    "row that is no whole blocks": (tensor(dims=[HIDDEN - 1, 96], kind=8), EMBEDDING),
    "alignment 0": (field("general.alignment", Kind.UINT32, 0), "alignment"),
    "alignment 33": (field("general.alignment", Kind.UINT32, 33), "alignment"),
    "alignment that is a text": (field("general.alignment", Kind.STRING, "x"), "alignment"),
}
METADATA: dict[str, tuple[Callable[[RawGGUF], object], str]] = {
    "no architecture": (without("general.architecture"), "general.architecture"),
    "architecture that is a number": (field("general.architecture", Kind.UINT32, 3), "general.architecture"),
    "unknown architecture": (field("general.architecture", Kind.STRING, "gemma"), "gemma"),
    "no embedding length": (without("llama.embedding_length"), "llama.embedding_length"),
    "no embedding": (lambda f: f.tensors.pop(EMBEDDING), EMBEDDING),
    "blocks that are a text": (field("llama.block_count", Kind.STRING, "two"), "llama.block_count"),
    "blocks that are a float": (field("llama.block_count", Kind.FLOAT32, 1.0), "llama.block_count"),
    "blocks that are an array": (raw("llama.block_count", array(Kind.UINT32, [1])), "llama.block_count"),
    "blocks that are true": (field("llama.block_count", Kind.BOOL, True), "llama.block_count"),
    "10^9 blocks": (field("llama.block_count", Kind.UINT32, 10**9), "llama.block_count"),
    "one block too many": (field("llama.block_count", Kind.UINT32, 2), "missing"),
    "-1 blocks": (field("llama.block_count", Kind.INT32, -1), "llama.block_count"),
    "no heads": (field("llama.attention.head_count", Kind.UINT32, 0), "llama.attention.head_count"),
    "heads that do not divide": (field("llama.attention.head_count", Kind.UINT32, 7), ""),
    "no rotating dimensions": (field("llama.rope.dimension_count", Kind.UINT32, 0), ""),
    "odd rotating dimensions": (field("llama.rope.dimension_count", Kind.UINT32, 3), ""),
    "rotating dimensions, a text": (field("llama.rope.dimension_count", Kind.STRING, "x"), "rope.dimension_count"),
    "theta NaN": (field("llama.rope.freq_base", Kind.FLOAT32, float("nan")), "llama.rope.freq_base"),
    "theta infinite": (field("llama.rope.freq_base", Kind.FLOAT32, float("inf")), "llama.rope.freq_base"),
    "theta negative": (field("llama.rope.freq_base", Kind.FLOAT32, -1.0), "llama.rope.freq_base"),
    "theta 1e-30": (field("llama.rope.freq_base", Kind.FLOAT32, 1e-30), "llama.rope.freq_base"),
    "epsilon NaN": (field("llama.attention.layer_norm_rms_epsilon", Kind.FLOAT32, float("nan")), "epsilon"),
    "context 2^40": (field("llama.context_length", Kind.UINT64, 1 << 40), "llama.context_length"),
    "width 2^31": (field("llama.embedding_length", Kind.UINT32, 1 << 31), "llama.embedding_length"),
    "width other than the tensors'": (field("llama.embedding_length", Kind.UINT32, 64), ""),
    "rope scaling of no kind": (field("llama.rope.scaling.type", Kind.STRING, "klingon"), "klingon"),
    "rope scaling kind is a number": (field("llama.rope.scaling.type", Kind.UINT32, 1), "rope"),
    "no tokens": (without(TOKENS), TOKENS),
    "tokens that are numbers": (raw(TOKENS, array(Kind.UINT32, [1] * 96)), TOKENS),
    "tokens that are one text": (field(TOKENS, Kind.STRING, "abc"), TOKENS),
    "too few tokens": (raw(TOKENS, array(Kind.STRING, ["a", "b", "ab"])), TOKENS),
    "too many tokens": (raw(TOKENS, array(Kind.STRING, [f"[{i}]" for i in range(500)])), TOKENS),
    "too few token types": (raw("tokenizer.ggml.token_type", array(Kind.INT32, [1])), "token_type"),
    "token types that are texts": (raw("tokenizer.ggml.token_type", array(Kind.STRING, ["a"] * 96)), "token_type"),
    "no merges": (without("tokenizer.ggml.merges"), "tokenizer.ggml.merges"),
    "merges of unknown tokens": (raw("tokenizer.ggml.merges", array(Kind.STRING, ["qq zz"])), ""),
    "merge without a space": (raw("tokenizer.ggml.merges", array(Kind.STRING, ["ab"])), ""),
    "merges that are numbers": (raw("tokenizer.ggml.merges", array(Kind.UINT32, [1])), "tokenizer.ggml.merges"),
    "no scores": (field("tokenizer.ggml.model", Kind.STRING, "llama"), "tokenizer.ggml.scores"),
    "too few scores": (scores([0.0]), "tokenizer.ggml.scores"),
    "scores NaN": (scores([float("nan")] * 96), "tokenizer.ggml.scores"),
    "unknown tokeniser": (field("tokenizer.ggml.model", Kind.STRING, "t5"), "t5"),
    "tokeniser that is a list": (raw("tokenizer.ggml.model", array(Kind.STRING, ["a"])), "tokenizer.ggml.model"),
    "unknown pre-tokeniser": (field("tokenizer.ggml.pre", Kind.STRING, "klingon"), "klingon"),
    "eos outside the vocabulary": (field("tokenizer.ggml.eos_token_id", Kind.UINT32, 96), "96"),
    "bos outside the vocabulary": (field("tokenizer.ggml.bos_token_id", Kind.UINT32, 1 << 31), "bos_token_id"),
    "unknown token is negative": (field("tokenizer.ggml.unknown_token_id", Kind.INT32, -1), "unknown_token_id"),
    "eos that is a text": (field("tokenizer.ggml.eos_token_id", Kind.STRING, "x"), "eos_token_id"),
    "template that is a number": (field("tokenizer.chat_template", Kind.UINT32, 1), "tokenizer.chat_template"),
    "template with a syntax error": (field("tokenizer.chat_template", Kind.STRING, "{% if %}"), "chat template"),
    "a long token of SentencePiece": (
        lambda f: (scores([0.0] * 96)(f), f.fields.update({TOKENS: array(Kind.STRING, [*LETTERS[1:], "a" * 300_000])})),
        TOKENS,
    ),
}  # fmt: skip
CASES = STRUCTURE | METADATA


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_the_good_file_is_good(tmp_path: Path, serve: Serve) -> None:
    code, stderr = serve(write(tmp_path / "good.gguf", good_file().bytes()))
    assert code == 0, stderr


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CASES)
def test_a_bad_file_is_refused(name: str, tmp_path: Path, serve: Serve) -> None:
    change, reason = CASES[name]
    bad = good_file()
    change(bad)
    assert_refused(serve(write(tmp_path / "bad.gguf", bad.bytes())), "bad.gguf", reason)


@pytest.mark.timeout(60)
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    content = good_file().bytes()
    header = len(content) - len(good_file().data)
    for length in [*range(0, header, 97), header - 1, header, header + 33, len(content) - 33, len(content) - 1]:
        path = write(tmp_path / "bad.gguf", content[:length])
        with pytest.raises(ValueError, match=r"^[^\n]*bad\.gguf: [^\n]*$"):
            load_config(path)


def test_from_python(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*bad\.gguf: [^\n]*$"):
        LLM(str(write(tmp_path / "bad.gguf", b"GGUF")))


def test_what_is_no_file(tmp_path: Path, serve: Serve) -> None:
    (tmp_path / "folder.gguf").mkdir()
    assert_refused(serve(tmp_path / "folder.gguf"), "folder.gguf")
    (tmp_path / "dangling.gguf").symlink_to("nowhere")
    assert_refused(serve(tmp_path / "dangling.gguf"), "dangling.gguf")


def test_scalars_may_be_of_any_width(tmp_path: Path) -> None:
    good = good_file()
    good.fields["llama.block_count"] = (Kind.UINT64, scalar(Kind.UINT64, 1))
    good.fields["x"] = array(Kind.BOOL, [True, False])
    assert load_config(write(tmp_path / "good.gguf", good.bytes())).num_layers == 1
