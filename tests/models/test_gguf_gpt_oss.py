"""GGUF files of gpt-oss: answers as of transformers on the numbers that they stand for, experts in MXFP4 stay so."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from dense_cache import packed_logits
from families import build, oracle_logits
from gguf.quants import dequantize
from gguf_files import quantized, write_model, write_tokenizer
from precision import assert_close_in_blocks
from test_families import sequences
from thread_group import on_ranks

from shadowkv.kvcache.policy.shape import FULL
from shadowkv.layers.group import Group
from shadowkv.models import load_config, load_model
from shadowkv.models.checkpoints.quantized.fp4 import MXFP4
from shadowkv.models.gguf.file import GGUFFile
from shadowkv.models.gguf.tokenizer import tokenizer_from_gguf
from shadowkv.serve.text.tool_formats import FORMATS, HARMONY, tool_format

SIZES = {"hidden_size": 96, "intermediate_size": 64}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
EXPERTS = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "MXFP4")
DENSE = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output", "output"), "Q8_0")


def rounded(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The numbers that rows stand for in blocks of a kind."""
    blocks = quantized(tensor.contiguous().numpy(), kind)
    return torch.from_numpy(dequantize(blocks, gguf.GGMLQuantizationType[kind]))


@torch.no_grad()
def write(folder: Path, name: str = "gpt_oss") -> tuple[Path, Any]:
    """A file as published ones are, and transformers' model of the numbers that it stands for."""
    model = build(name, folder, SIZES)
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 3:  # of experts, with rows as columns
            parameter.copy_(rounded(parameter.transpose(1, 2), "MXFP4").transpose(1, 2))
        elif parameter_name.endswith(("_proj.weight", "lm_head.weight")):
            parameter.copy_(rounded(parameter, "Q8_0"))
    return write_model(folder / "model.gguf", model, kinds=EXPERTS | DENSE, **YARN), model


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss-no-attention-bias"])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    file, theirs = write(tmp_path, name)
    ours = load_model(file, dtype=torch.float32)
    assert_close_in_blocks(packed_logits(ours.model, sequences()), partial(oracle_logits, theirs, sequences()))
    stated = load_config(tmp_path)
    assert ours.config.layer_kinds[0].window == 9 and ours.config.layer_kinds[1] == FULL
    assert {**vars(ours.config), "rms_norm_eps": stated.rms_norm_eps} == vars(stated)


def test_experts_stay_in_mxfp4(tmp_path: Path) -> None:
    file, theirs = write(tmp_path)
    model = load_model(file).model
    experts = model.layers[1].mlp.experts
    for projection in (experts.gate_up, experts.down):
        assert {block.form for block in projection.weight.row_blocks} == {MXFP4}
    assert MXFP4.name in model.forms
    biases = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name and name.endswith(".bias"))
    numbers = sum(parameter.numel() for parameter in theirs.parameters() if parameter.ndim == 3)
    assert model.expert_bytes - biases == numbers * 17 // 32


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks(expert_parallel: bool, tmp_path: Path) -> None:
    file, theirs = write(tmp_path)

    def part(group: Group) -> list[torch.Tensor]:
        model = load_model(file, group=group, dtype=torch.float32, expert_parallel=expert_parallel).model
        return packed_logits(model, sequences())

    for found in on_ranks(2, part):
        assert_close_in_blocks(found, partial(oracle_logits, theirs, sequences()))


def test_all_exponents_and_codes(tmp_path: Path) -> None:
    """But the exponent 255, which is no number in OCP's format: ggml has 2 to the power of 128 there."""
    blocks = np.random.default_rng(0).integers(0, 256, (255, 3, 17), np.uint8)
    blocks[..., 0] = np.arange(255)[:, None]
    rows = blocks.reshape(255, 51)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gpt-oss")
    writer.add_tensor("output.weight", rows, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = GGUFFile(tmp_path / "model.gguf").stored("output.weight")
    with np.errstate(over="ignore"):
        wanted = dequantize(rows, gguf.GGMLQuantizationType.MXFP4)
    torch.testing.assert_close(stored.form.unpack(stored.tensors), torch.from_numpy(wanted), rtol=0, atol=0)


def write_vocabulary(path: Path, **more: Any) -> Path:
    """Bytes as tokens, and the marks of Harmony."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    marks = ["<|return|>", "<|call|>", "<|channel|>", "<|message|>"]
    words = [*letters, "ab"]
    types = [1] * len(words) + [3] * len(marks)
    return write_tokenizer(path, "gpt-oss", "gpt2", words + marks, pre="gpt-4o", merges=["a b"], types=types, **more)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("HelloWorld isn't THEY'LL", ["Hello", "World", " isn't", " THEY'LL"]),
        ("HTTPServer XMLHttp", ["HTTPServer", " XMLHttp"]),
        ("camelCase getURLOf", ["camel", "Case", " get", "URLOf"]),
        ("12345 in 2026", ["123", "45", " in", " ", "202", "6"]),
        ("中文字符123和日本語", ["中文字符", "123", "和日本語"]),
        ("naïve x̂ हिन्दी", ["naïve", " x̂", " हिन्दी"]),
        ("a  b\n\n  c/*\n*/\nd", ["a", " ", " b", "\n\n", " ", " c", "/*\n", "*/\n", "d"]),
        ("path/to//\nfile…", ["path", "/to", "//\n", "file", "…"]),
        ("'S 's", ["'S", " '", "s"]),
        (" \t\r\n ", [" \t\r\n", " "]),
    ],
)
def test_words_of_gpt_4o(text: str, words: list[str], tmp_path: Path) -> None:
    backend = tokenizer_from_gguf(GGUFFile(write_vocabulary(tmp_path / "model.gguf"))).backend
    assert [text[slice(*span)] for _, span in backend.pre_tokenizer.pre_tokenize_str(text)] == words


def test_the_template_tells_its_format(tmp_path: Path) -> None:
    template = "<|start|>assistant<|channel|>analysis<|message|>{{ messages[0].content }}"
    tokenizer = tokenizer_from_gguf(GGUFFile(write_vocabulary(tmp_path / "model.gguf", template=template)))
    assert tokenizer.chat_template == template
    assert tool_format(None, template) == FORMATS[HARMONY]
    ends = {tokenizer.backend.token_to_id(name) for name in ("<|return|>", "<|call|>")}
    assert ends <= tokenizer.eos_token_ids
