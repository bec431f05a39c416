"""Tables of n-gram embeddings: on the device, in host memory and in files they give the same numbers, also in 8-bit
floats. Sizes decide where a GPU has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_files import edit_json
from families import build
from safetensors.torch import load_file, save_file
from test_adapter import write_adapter
from test_experts_engine import oracle, prompt
from test_minimax_m3 import assert_close, lossless
from test_quantized_engine import answers, assert_alike
from thread_group import on_ranks
from torch import Tensor, nn

from shadowkv.engine.execution.runner import Runner
from shadowkv.eval.running.caches import open_cache, prefill
from shadowkv.layers.group import Group
from shadowkv.layers.spec import N_GRAM_TOKENS, TableForm
from shadowkv.layers.streams.hyper_connections import HyperConnectedLayer
from shadowkv.layers.streams.row_table import RowTable
from shadowkv.models import LoadedModel, load_config, load_model, loader, storage
from shadowkv.models.checkpoints.safetensors_weights import SafetensorsWeights
from shadowkv.models.decoder import Decoder
from shadowkv.ops.recurrence import Spans, in_order
from shadowkv.plan.__main__ import main
from shadowkv.wording import GIB

FP8, TABLES = torch.float8_e4m3fn, "ngram_embedding"
LONG = {"max_position_embeddings": 1024}
PUBLISHED = {"ngram_vocab_size_base": 20_000_000, "heads_per_ngram": 8, "ple_embed_dim": 2560, "ple_layer_ids": [1]}
"""320 million rows of 160 numbers."""


def store_tables(directory: Path, theirs: nn.Module, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Stores the tables of a saved model in ``dtype``, divided by ``scale``. transformers' own model gets the same
    numbers."""
    file = directory / "model.safetensors"
    weights = {
        name: (weight / scale).to(dtype) if TABLES in name else weight for name, weight in load_file(file).items()
    }
    save_file(weights, file, {"format": "pt"})
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if TABLES in name:
                parameter.copy_((parameter / scale).to(dtype).float() * scale)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads tables into a given place, as they would be on a GPU."""
    in_files = storage.in_files

    def choose(place: Any) -> None:
        monkeypatch.setattr(storage, "in_files", lambda *arguments: in_files(*arguments[:-1], False))
        monkeypatch.setattr(loader, "_placed", lambda outline, tables, device: TableForm(place, tables.dtype))

    return choose


def logits(loaded: LoadedModel) -> tuple[list[list[int]], list[Tensor]]:
    """Texts, and the logits after a prompt and after each of four steps."""
    cache = open_cache(loaded, lossless("full", loaded), 600, slots=4)
    runner, text = Runner(loaded.model, cache), prompt(0, 150)
    sequence, texts = cache.allocate(len(text), 600), [text]
    found = [prefill(loaded.model, cache, [(sequence, text)])[0]]
    for token in prompt(1, 4):
        texts.append([*texts[-1], token])
        found.append(runner.decode([sequence], [token])[0])
    return texts, found


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_places_and_dtypes_have_the_logits_of_transformers(
    stored: torch.dtype, tmp_path: Path, as_on_a_gpu: Any
) -> None:
    theirs = build("qwen4_exp", tmp_path, LONG)
    store_tables(tmp_path, theirs, stored)
    in_files = load_model(tmp_path)
    texts, expected = logits(in_files)
    assert_close(torch.stack(expected), [oracle(theirs, text) for text in texts])
    for place in ("device", "host"):
        as_on_a_gpu(place)
        loaded = load_model(tmp_path)
        size = stored.itemsize * sum(weight.numel() for name, weight in theirs.named_parameters() if TABLES in name)
        assert loaded.model.table_bytes == {place: size} and in_files.model.table_bytes == {"files": size}
        on_device = size if place == "device" else 0
        assert loaded.model.num_bytes == in_files.model.num_bytes + on_device
        assert loaded.model.num_parameters == in_files.model.num_parameters
        for mine, other in zip(logits(loaded)[1], expected, strict=True):
            assert torch.equal(mine, other)


def test_parts_in_several_dtypes_become_the_models(tmp_path: Path, as_on_a_gpu: Any) -> None:
    build("qwen4_exp", tmp_path, LONG)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    (name, *_) = (name for name in weights if TABLES in name)
    save_file({**weights, name: weights[name].to(FP8)}, file, {"format": "pt"})
    _, expected = logits(load_model(tmp_path))
    as_on_a_gpu("host")
    loaded = load_model(tmp_path)
    assert {table.stored for table in loaded.model.tables.values()} == {torch.float32}
    assert all(map(torch.equal, logits(loaded)[1], expected))


def test_tables_of_files_are_not_read_when_a_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("qwen4_exp", tmp_path)
    read, whole = list[str](), SafetensorsWeights.read
    monkeypatch.setattr(
        SafetensorsWeights, "read", lambda self, name, *more: (read.append(name), whole(self, name, *more))[1]
    )
    loaded = load_model(tmp_path, dtype="bfloat16")
    assert read and not any(TABLES in name for name in read)
    for table in loaded.model.tables.values():
        assert len(table.parts) == 4 and {part.dtype for _, part in table.parts} == {torch.float32}
        assert table(torch.tensor([[0, 1]])).dtype == torch.bfloat16


def test_parts_have_the_rows_of_one_table() -> None:
    """Rows in any order, at borders, twice, and none."""
    whole = torch.randn(37, 5)
    table = RowTable(37, 5, TableForm("files"), torch.float32, torch.device("cpu"))
    table.use((start, whole[start : start + 8]) for start in (16, 0, 32, 8, 24))
    for rows in (torch.randint(37, (50, 3)), torch.tensor([[36, 0, 7, 8, 7, 31, 32]]), torch.empty(0, 3, dtype=int)):
        assert torch.equal(table(rows), whole[rows])


def test_adapters_of_tables_are_refused(tmp_path: Path) -> None:
    build("qwen4_exp", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    (name, *_) = (name for name in weights if TABLES in name)
    (rows, columns), module = weights[name].shape, name.removesuffix(".weight")
    pairs = {f"{module}.lora_A.weight": torch.randn(4, columns), f"{module}.lora_B.weight": torch.randn(rows, 4)}
    adapter = write_adapter(tmp_path / "adapter", pairs)
    with pytest.raises(ValueError, match=rf"adapter changes tables of n-gram embeddings: {name}"):
        load_model(tmp_path / "model", adapter=adapter)


@pytest.mark.parametrize("scale", [None, 0.25], ids=["without a scale", "with a scale"])
def test_tables_of_quantized_checkpoints(scale: float | None, tmp_path: Path) -> None:
    """Without a scale they stay as they are; with one they are dequantized."""
    theirs = build("qwen4_exp", tmp_path, LONG)
    store_tables(tmp_path, theirs, FP8, scale or 1.0)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "fp8"})
    if scale is not None:
        file = tmp_path / "model.safetensors"
        weights = load_file(file)
        weights |= {f"{name}_scale": torch.tensor(scale) for name in weights if TABLES in name}
        save_file(weights, file, {"format": "pt"})
    loaded = load_model(tmp_path)
    assert {table.stored for table in loaded.model.tables.values()} == {FP8 if scale is None else torch.float32}
    texts, found = logits(loaded)
    assert_close(torch.stack(found), [oracle(theirs, text) for text in texts])


def test_other_weights_cannot_be_plain_8_bit_floats(tmp_path: Path) -> None:
    build("qwen4_exp", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    (name, *_) = (name for name in weights if name.endswith("ple.key_proj.weight"))
    save_file({**weights, name: weights[name].to(FP8)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"tensor '{name}' is of type F8_E4M3; supported: F64, F32, F16, BF16"):
        load_model(tmp_path)


@pytest.mark.parametrize("place", ["device", "host", "files"])
def test_ranks_have_shares_of_the_rows(place: str, tmp_path: Path, as_on_a_gpu: Any) -> None:
    theirs = build("qwen4_exp", tmp_path, LONG)
    store_tables(tmp_path, theirs, FP8)
    whole = load_model(tmp_path).model.tables
    if place != "files":
        as_on_a_gpu(place)

    def rows(group: Group) -> dict[str, Tensor]:
        tables = load_model(tmp_path, group=group).model.tables
        for name, table in tables.items():
            assert table.place == place and 0 < table.rows < whole[name].rows
            assert table.first == (whole[name].rows - table.rows if group.rank else 0)
        return {name: table(torch.arange(whole[name].rows)[None]) for name, table in tables.items()}

    for found in on_ranks(2, rows):
        assert found.keys() == whole.keys()
        for name, of_table in found.items():
            assert torch.equal(of_table, whole[name](torch.arange(whole[name].rows)[None]))


def test_ranks_answer_as_one_from_8_bit_floats(tmp_path: Path) -> None:
    theirs = build("qwen4_exp", tmp_path, LONG)
    store_tables(tmp_path, theirs, FP8)
    lines, expected = answers(tmp_path)
    assert "tables  2 tables of n-gram embeddings, 0.00 GiB in float8_e4m3fn, in the files, read by rows" in lines
    assert_alike(answers(tmp_path, tensor_parallel_size=2)[1], expected)


@pytest.mark.parametrize("chains", [(1, 4, 1), (5, 2), (1, 1)])
def test_histories_of_chained_rows_are_those_of_single_steps(chains: tuple[int, ...], tmp_path: Path) -> None:
    """Also beside rows that read and write one state, as the padding of a graph does."""
    build("qwen4_exp", tmp_path)
    (layer, *_) = load_model(tmp_path).model.layers
    assert isinstance(layer, HyperConnectedLayer) and layer.n_grams is not None
    n_grams, read, write, count = layer.n_grams, list[int](), list[int](), sum(chains)
    for length in chains:
        rows = torch.arange(length + 1) + len(read) + len(write)
        read, write = [*read, *rows[:-1].tolist()], [*write, *rows[1:].tolist()]
    spare = read[-1] + 2
    read, write, rows = [*read, spare, spare], [*write, spare, spare], spare + 1
    ids = torch.randint(96, (count + 2,))
    before = torch.randint(-2, 94, (rows, 1, n_grams.sizes.longest - 1)).float()
    spans = Spans(None, torch.tensor(read), torch.tensor(write), chained=True)
    one_by_one, together = {N_GRAM_TOKENS: before.clone()}, {N_GRAM_TOKENS: before.clone()}
    wanted = in_order(lambda token, span: n_grams._history(token, one_by_one, span), spans, ids)
    assert torch.equal(n_grams._history(ids, together, spans)[:count], wanted[:count])
    assert torch.equal(together[N_GRAM_TOKENS][:spare], one_by_one[N_GRAM_TOKENS][:spare])


def test_rows_that_keep_their_state_follow_none() -> None:
    spans = Spans(None, torch.tensor([4, 0, 1, 2, 7, 7]), torch.tensor([4, 1, 2, 3, 7, 7]), chained=True)
    assert spans.follows.tolist() == [False, False, True, True, False, False]
    alone = torch.tensor([4])
    assert not Spans(None, alone, alone, chained=True).follows.any()


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A small model with tables of the published size."""
    build("qwen4_exp", tmp_path, {"vocab_size": 96})
    edit_json(tmp_path / "config.json", **PUBLISHED)
    return tmp_path


def test_sizes_decide_where_a_gpu_has_tables(published: Path) -> None:
    config = load_config(published)

    def place(memory: float, host: float | None, dtype: torch.dtype | None = None, ranks: int = 1) -> TableForm:
        outline = Decoder(config, torch.bfloat16, "meta", group=Group(0, ranks), tables=TableForm("device", dtype))
        return storage.on_gpu(outline, int(memory * GIB), None if host is None else int(host * GIB))

    assert place(139, None) == place(139, 96) == TableForm("host", torch.bfloat16)
    assert place(139, None, FP8) == TableForm("device", FP8)
    assert place(80, None, FP8) == place(80, 48, FP8) == TableForm("host", FP8)
    assert place(80, 47, FP8) == place(80, None, FP8, ranks=2) == TableForm("device", FP8)
    assert place(80, 95, ranks=2) == TableForm("device", torch.bfloat16)
    assert place(80, 96, ranks=2) == TableForm("host", torch.bfloat16)


def test_a_plan_says_where_tables_are(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--model", str(published), "--context", "200", "--kv", "full", "--gpu-memory-gib"]
    assert main([*command, "139"]) == 0
    text = capsys.readouterr().out
    assert "\ntables   1 table of n-gram embeddings, 95.37 GiB in bfloat16, in host memory, read by rows\n" in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("host GiB at")] == ["95.4"]
    plans = {}
    for memory in ("139", "300"):
        assert main([*command, memory, "--json"]) == 0
        plans[memory] = json.loads(capsys.readouterr().out)
    table = plans["139"]["host_table_bytes"]
    assert table == pytest.approx(320e6 * 160 * 2, rel=1e-5) and plans["300"]["host_table_bytes"] == 0
    assert plans["300"]["weight_bytes"] == plans["139"]["weight_bytes"] + table
    for memory in ("139", "300"):
        assert plans[memory]["weight_bytes_read_per_step"] == plans["139"]["weight_bytes_read_per_step"]


def test_a_model_whose_tables_fit_nowhere_is_refused(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "free_bytes", lambda device: 90 * GIB)
    with pytest.raises(MemoryError, match=r"need 95\.37 GiB, 95\.37 GiB of it for n-gram tables, as bfloat16 on cpu"):
        load_model(published, load_format="dummy", dtype="bfloat16")


def test_random_tables_are_random_wherever_they_are(tmp_path: Path, as_on_a_gpu: Any) -> None:
    build("qwen4_exp", tmp_path)
    for place in ("device", "host"):
        as_on_a_gpu(place)
        loaded = load_model(tmp_path, load_format="dummy", dtype="bfloat16")
        for table in loaded.model.tables.values():
            assert table.place == place and table(torch.arange(table.rows)[None]).float().std() > 0.1
