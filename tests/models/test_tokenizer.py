"""Tokenisers from GGUF metadata and from directories give transformers' ids, texts and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf_files import write_tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shadowkv.models import LoadedModel, Tokenizer
from shadowkv.models.gguf.file import GGUFFile
from shadowkv.models.gguf.tokenizer import tokenizer_from_gguf
from shadowkv.models.tokenization.text_form import BYTE_ALPHABET
from shadowkv.models.tokenization.tokenizer_files import byte_tokenizer, tokenizer_from_directory

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "The key is 7304981, not 42.",
    "   leading and trailing   ",
    "tabs\tand\nnew\r\nlines\n\n\nand a gap",
    "I'll say we're done, don't you? IT'S",
    "def f(x: int) -> int:\n    return x ** 2  # comment\n",
    "naïve café — “quotes” … ellipsis",
    "中文字符和日本語のテキスト 한국어",
    "emoji 🎉 family 👩‍👩‍👧 flag 🇩🇪",
    "עברית العربية ελληνικά",
    "x̂ = ∑ αᵢ · βᵢ ≤ ∞",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    '{"a": [1, 2.5, null], "b": "\\u00e9"}',
    "a" * 200,
    "\x00\x01\x7f \ufffd \u200b",
]
DIGITS_AFTER_GAPS = ["a  42", "list:\n\n1. one\n\n2. two", "1  2   3", "½ ² Ⅷ ٣"]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<b>Hi</b> & 'bye'\n"}],
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Sure?"},
    ],
]


@pytest.fixture(scope="module")
def oracle(smollm2_file: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_file.parent, gguf_file=smollm2_file.name)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_equals_transformers(text: str, smollm2: LoadedModel, oracle: Any) -> None:
    ids = smollm2.tokenizer.encode(text)
    assert ids == oracle.encode(text)
    assert smollm2.tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text, add_special_tokens=False)
    assert smollm2.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert smollm2.tokenizer.spelling(ids) == oracle.convert_ids_to_tokens(ids)
    assert smollm2.tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", [*TEXTS, *DIGITS_AFTER_GAPS])
def test_smollm2_splits_digits_first(text: str, smollm2: LoadedModel, oracle: Any) -> None:
    # transformers drops the file's pre-tokenizer "smollm" and uses GPT-2's, which cuts gaps before digits elsewhere;
    # the model's own tokenizer.json and llama.cpp split digits first.
    backend = tokenizers.Tokenizer.from_str(oracle.backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    assert smollm2.tokenizer.encode(text) == backend.encode(text).ids


def test_smollm2_properties(smollm2: LoadedModel, oracle: Any) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer.vocab_size == len(oracle) == 49152
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == {oracle.convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_smollm2_chat_template(chat: list[dict[str, Any]], prompt: bool, smollm2: LoadedModel, oracle: Any) -> None:
    ours = smollm2.tokenizer.apply_chat_template(chat, add_generation_prompt=prompt)
    assert ours == oracle.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)


@pytest.mark.parametrize("text", TEXTS)
def test_stream_gives_whole_characters(text: str, smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    stream = tokenizer.stream(skip_special_tokens=False)
    pieces = [stream.push([token]) for token in tokenizer.encode(text)]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == text


def test_stream_replaces_what_never_completes(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    whole = tokenizer.encode("🜚")
    assert len(whole) > 1
    partial = whole[:1]
    stream = tokenizer.stream()
    assert stream.push([partial[0]]) == ""
    assert stream.flush() == "\ufffd"
    stream = tokenizer.stream()
    pushed = [stream.push([partial[0]]) for _ in range(100)]
    assert any(pushed), "text that is no UTF-8 must not be held back for ever"
    stream = tokenizer.stream()
    assert not any(stream.push([2]) for _ in range(100)), "special tokens are skipped"
    assert stream.push(tokenizer.encode("Hi")[:1]) == "Hi"


SPM_WORDS = ["▁t", "he", "▁the", "in", "▁in", "er", "▁w", "or", "ld", "▁wor", "▁world", "▁▁", "▁a", "▁an", "an"]


def write_sentencepiece(path: Path, arch: str) -> Path:
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzHTé,."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_WORDS, *letters]
    scores = [0.0] * 259 + [-float(index) for index in range(len(SPM_WORDS) + len(letters))]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    return write_tokenizer(path, arch, "llama", tokens, scores=scores, types=types)


SPM_TEXTS = ["the world", "  there in an and ", "The  worlds\nwither", "café 中 🎉", "an</s> the</s>world", "H", ""]


@pytest.mark.parametrize("arch", ["llama", "phi3"])
@pytest.mark.parametrize("text", SPM_TEXTS)
def test_sentencepiece_equals_transformers(text: str, arch: str, tmp_path: Path) -> None:
    sentencepiece_file = write_sentencepiece(tmp_path / "spm.gguf", arch)
    theirs = AutoTokenizer.from_pretrained(sentencepiece_file.parent, gguf_file=sentencepiece_file.name)
    ours = tokenizer_from_gguf(GGUFFile(sentencepiece_file))
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ids[0] == ours.bos_token_id == 1
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    stream = ours.stream()
    assert "".join(stream.push([token]) for token in ids) + stream.flush() == ours.decode(ids)
    assert ours.stream().push(ids) == ours.decode(ids)


GEMMA_TEMPLATE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') + message['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def test_gemma(tmp_path: Path) -> None:
    """Runs of spaces and of line ends are tokens of their own, no space is put first, and its template is applied."""
    own = ["<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "  ", "   "]
    words = ["▁the", "the", "th", "he", "▁t", "user", "us", "er", "mo", "del", "model", "de", "▁", *"thebusrmodl"]
    tokens = ["<unk>", "<bos>", "<eos>", *own, *dict.fromkeys(words)]
    types = [2, 3, 3, 3, 3, 4, 4, 4, 4, *[1] * (len(tokens) - 9)]
    scores = [0.0] * 9 + [-float(index) for index in range(len(tokens) - 9)]
    options = {"scores": scores, "types": types, "template": GEMMA_TEMPLATE, "space_prefix": False}
    tokenizer = tokenizer_from_gguf(
        GGUFFile(write_tokenizer(tmp_path / "g.gguf", "gemma3", "llama", tokens, **options))
    )

    def ids(*texts: str) -> list[int]:
        return [tokens.index(text) for text in texts]

    for text, wanted in (
        ("the the", ids("the", "▁the")),
        ("  the   the", ids("  ", "the", "   ", "the")),
        ("the\n\n\nthe\n", ids("the", "\n\n", "\n", "the", "\n")),
        (" the", ids("▁the")),
    ):
        assert tokenizer.encode(text) == [1, *wanted]
        assert tokenizer.decode(wanted) == text
    chat = [{"role": "system", "content": "the"}, {"role": "user", "content": "the the"}]
    begin, end, line = "<start_of_turn>", "<end_of_turn>", "\n"
    asked = ids(begin, "user", line, "the", "\n\n", "the", "▁the", end, line, begin, "model", line)
    assert tokenizer.encode_chat(chat) == [1, *asked]
    with pytest.raises(ValueError, match="roles must alternate"):
        tokenizer.encode_chat([chat[1], chat[1]])


@pytest.mark.parametrize(("pre", "adds_bos"), [("llama-bpe", True), ("qwen2", False), ("gpt-2", False)])
def test_byte_level_kinds_equal_transformers(pre: str, adds_bos: bool, tmp_path: Path) -> None:
    merges = ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "Ċ Ċ", "Ġ Ġ", "i n", "' s"]
    tokens = ["<|endoftext|>", "<s>", "</s>", *BYTE_ALPHABET, *(merge.replace(" ", "") for merge in merges)]
    types = [3, 3, 3, *[1] * (len(tokens) - 3)]
    arch = "qwen2" if pre == "qwen2" else "llama"
    file = write_tokenizer(tmp_path / "bpe.gguf", arch, "gpt2", tokens, pre=pre, merges=merges, types=types)
    ours = tokenizer_from_gguf(GGUFFile(file))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in [*TEXTS, *DIGITS_AFTER_GAPS, "in 12345\n\n\n  the 's IT'S"]:
        composed = "x̂" not in text or pre != "qwen2"
        if composed:
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text
    assert (ours.encode("the")[0] == 1) == adds_bos


def test_unknown_kinds_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'t5' is not supported; supported: gpt2, llama"):
        tokenizer_from_gguf(GGUFFile(write_tokenizer(tmp_path / "a.gguf", "llama", "t5", ["a", "b", "c"])))
    file = write_tokenizer(tmp_path / "b.gguf", "llama", "gpt2", ["a", "b", "c"], pre="klingon", merges=["a b"])
    with pytest.raises(ValueError, match="pre-tokenizer 'klingon'"):
        tokenizer_from_gguf(GGUFFile(file))


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "{{ m.role }}:{{ m.content | trim }}\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)


def write_directory(directory: Path, post_processor: bool = True, **config: Any) -> Tokenizer:
    vocab = {character: index for index, character in enumerate(BYTE_ALPHABET)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    if post_processor:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return tokenizer_from_directory(directory, eos_token_ids=[9])


def test_directory(tmp_path: Path) -> None:
    tokenizer = write_directory(tmp_path, chat_template=TEMPLATE)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, {9, 257})
    tools = [{"name": "é<&>"}]
    ours = tokenizer.apply_chat_template(CHATS[1], tools=tools)
    assert ours == theirs.apply_chat_template(CHATS[1], tools=tools, tokenize=False, add_generation_prompt=True)
    assert ours.endswith('[{"name": "é<&>"}]')


def test_bos_by_config(tmp_path: Path) -> None:
    ids = write_directory(tmp_path / "a", post_processor=False, add_bos_token=True).encode("hi")
    assert ids[0] == 256
    ids = write_directory(tmp_path / "b", post_processor=True, add_bos_token=False, add_eos_token=True).encode("hi")
    assert (ids[0] != 256, ids[-1]) == (True, 257)


def test_template_forms(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    assert write_directory(tmp_path / "a", chat_template=named).apply_chat_template([]) == "yes"
    two = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0] }} <tool_call>"}]
    choosing = write_directory(tmp_path / "c", chat_template=two)
    assert choosing.apply_chat_template([]) == "plain"
    assert choosing.apply_chat_template([], tools=[{"name": "f"}]) == "{'name': 'f'} <tool_call>"
    (tmp_path / "a" / "chat_template.jinja").write_text("file")
    assert tokenizer_from_directory(tmp_path / "a").apply_chat_template([]) == "file"
    plain = write_directory(tmp_path / "b")
    assert not plain.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        plain.apply_chat_template([])


def test_template_errors(tmp_path: Path) -> None:
    tokenizer = write_directory(tmp_path / "a", chat_template=TEMPLATE)
    with pytest.raises(ValueError, match="no tools here"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}])
    with pytest.raises(ValueError, match="not valid"):
        write_directory(tmp_path / "b", chat_template="{% if %}")
    unsafe = write_directory(tmp_path / "c", chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="refuses"):
        unsafe.apply_chat_template([])


def test_byte_tokenizer() -> None:
    tokenizer = byte_tokenizer(300, (299,))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 300
    assert tokenizer.eos_token_ids == {299}
    assert tokenizer.decode([72, 105, 270, 299]) == "Hi<270>"
    assert tokenizer.apply_chat_template(CHATS[0]) == "user: Hi\nassistant: "
