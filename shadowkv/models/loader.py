"""Loading: a source and the user's overrides -> a decoder with its weights, its config and its tokeniser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from shadowkv.layers.group import ALONE, Group
from shadowkv.load_settings import DTYPES, LOAD_FORMATS
from shadowkv.models.checkpoints.adapter import Adapter
from shadowkv.models.checkpoints.fp8_weights import FP8Weights
from shadowkv.models.checkpoints.quantization import REMEDY, read_quantization
from shadowkv.models.checkpoints.safetensors_weights import SafetensorsWeights
from shadowkv.models.checkpoints.stored_weight import Stored
from shadowkv.models.configs.hf_fields import are_token_ids
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.decoder import Decoder
from shadowkv.models.dummy import fill_dummy
from shadowkv.models.families.overrides import overridden_config
from shadowkv.models.families.registry import family
from shadowkv.models.files import OTHER_MODEL, ModelFileError, is_there, naming, read_json
from shadowkv.models.fp8_format import FP8Format
from shadowkv.models.generation_config import GENERATION_CONFIG, read_sampling
from shadowkv.models.gguf.config import config_from_gguf
from shadowkv.models.gguf.file import GGUFFile
from shadowkv.models.gguf.tokenizer import tokenizer_from_gguf
from shadowkv.models.gguf.weights import gguf_forms, gguf_shapes, stream_gguf
from shadowkv.models.requirements import check_hardware, check_memory
from shadowkv.models.sharding import Shard
from shadowkv.models.sources import is_hub_id, resolve
from shadowkv.models.tokenization.byte_tokenizer import byte_tokenizer
from shadowkv.models.tokenization.tokenizer import Tokenizer, tokenizer_from_directory
from shadowkv.models.weights import block_runs, check_shapes, fill, quantised
from shadowkv.ops.registry import Ops
from shadowkv.wording import SettingsError

Runnable = Callable[[ModelConfig], ModelConfig]
"""Refuses a config that cannot run here; returns it as it will be run."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        config: the config with the user's overrides applied.
        shard: the part of it that this rank has; all of it if the model is on one device.
        model: that part, on its device.
        tokenizer: the model's, or bytes if the weights are dummies.
        name: the catalogue name or hub id it was requested by, or the last part of its path.
        notes: what was done to weights that the user may not expect, one line each.
        sampling: parameters in its generation_config.json.
    """

    config: ModelConfig
    shard: Shard
    model: Decoder
    tokenizer: Tokenizer
    name: str
    notes: tuple[str, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)


def load_config(
    source: str | Path,
    max_model_len: int | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    quantization: str | None = None,
) -> ModelConfig:
    """ModelConfig of a source without its weights; raises as ``load_model`` does."""
    path = resolve(source, weights=False)
    if path.suffix == ".gguf":
        config = config_from_gguf(GGUFFile(path), max_model_len, hf_overrides)
    else:
        config, _ = _config_from_directory(path, max_model_len, hf_overrides)
    return _quantised(config, quantization)


def load_model(
    source: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    adapter: str | Path | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
    quantization: str | None = None,
    group: Group = ALONE,
) -> LoadedModel:
    """Loads a model, or this rank's part of it.

    Args:
        source: catalogue name, Hugging Face directory (safetensors), .gguf file, or hub id ``org/name``.
        dtype: of the weights; ``auto`` is bfloat16 on a GPU and float32 on a CPU.
        device: where the weights go.
        load_format: ``auto``, or ``dummy`` for random weights of the right shapes.
        adapter: directory of a PEFT LoRA adapter to merge.
        hf_overrides: entries that replace those of the model's config, by the names of a config.json. With a
            ``rope_theta`` the longest sequence is ``max_model_len``, as the user says.
        max_model_len: longest sequence that will be run; decides LongRoPE's factors.
        quantization: ``fp8`` stores the weights of projections in 8-bit floats, which fp8 checkpoints have anyway.
        group: the ranks that the model is split across.

    Raises:
        FileNotFoundError: the source or files of it do not exist, or there are only pickled weights.
        ValueError: the config cannot be run, ``max_model_len`` is too long, tensors are missing or left over, or a
            file is corrupt or says that the checkpoint is quantised, except fp8: ModelFileError, one line naming it.
            Or the device does not support fp8 arithmetic.
        OSError: a file cannot be read, or a download failed.
        MemoryError: the weights need more memory than is free on ``device``; none has been read or created then.
    """
    if load_format not in LOAD_FORMATS:
        raise SettingsError(f"load_format={load_format!r} is not one of {', '.join(LOAD_FORMATS)}", ["load_format"])
    name = _name(source)
    device = torch.device(device)
    weights_dtype = _dtype(dtype, device)

    # Before anything is fetched or read.
    check_hardware(quantization, device, weights_dtype, "quantization='fp8':", "leave it out")

    def runnable(config: ModelConfig) -> ModelConfig:
        who = f"{source}: its weights are quantised in fp8, and"
        check_hardware(config.quantization, device, weights_dtype, who, REMEDY)
        return _quantised(config, quantization)

    if load_format == "dummy":
        if adapter is not None:
            raise SettingsError("an adapter has no meaning with load_format='dummy'", ["load_format"])
        return _dummy(runnable(load_config(source, max_model_len, hf_overrides)), weights_dtype, device, group, name)
    if is_hub_id(source):
        # What cannot be run is refused before gigabytes of its weights are fetched.
        runnable(load_config(source, max_model_len, hf_overrides))
    path = resolve(source, weights=True)
    sampling = read_sampling(path) if path.is_dir() else {}
    files = (_gguf if path.suffix == ".gguf" else _directory)(path, max_model_len, hf_overrides, runnable)
    config, shapes, tensors = files.config, files.shapes, files.tensors
    whole = config.quantization is None and group.size == 1
    forms = dict(files.forms) if whole and _keeps_blocks(device) else {}
    notes: tuple[str, ...] = ()
    # All errors that can be found are found before anything as large as the weights is allocated or read.
    targets, outline = family(config.architecture).targets(config), Decoder(config, weights_dtype, "meta")
    with naming(path, "use the config that belongs to the weights, and all of their files"):
        check_shapes(outline, targets, shapes)
    if adapter is not None:
        merge = Adapter(Path(adapter))
        merge.check(shapes)
        tensors = merge.merged(tensors)
        if changed := [weight for weight in merge.changed if forms.pop(weight, None)]:
            notes = (f"{len(changed)} weights that the adapter changes are dequantised: {changed[0]}, ...",)
    runs, shard = block_runs(targets, forms), Shard(config, group.rank, group.size)
    check_memory(Decoder(shard.config, weights_dtype, "meta", runs, group), device)
    model = Decoder(shard.config, weights_dtype, device, runs, group)
    # A progress bar, if the output is a terminal.
    fill(model, targets, tqdm(tensors, "loading weights", len(shapes), unit="tensor", leave=False, disable=None), shard)
    if files.in_fp8 is not None:
        notes = files.in_fp8.notes(quantised(model, targets))
    return LoadedModel(config, shard, model, files.tokenizer, name, notes, sampling)


def _dummy(config: ModelConfig, dtype: torch.dtype, device: torch.device, group: Group, name: str) -> LoadedModel:
    """A model of random weights, whose tokens are bytes."""
    shard = Shard(config, group.rank, group.size)
    check_memory(Decoder(shard.config, dtype, "meta", group=group), device)
    model = Decoder(shard.config, dtype, device, group=group)
    fill_dummy(model)
    return LoadedModel(config, shard, model, byte_tokenizer(config.vocab_size, config.eos_token_ids), name)


@dataclass(frozen=True)
class _Files:
    """What a model's files say, before any weight is read.

    Attributes:
        shapes: of all weights, by their names in the files.
        tensors: the weights, read one after another.
        forms: blocks of quantised numbers that weights are stored in, by their names.
        in_fp8: the weights, if they are stored in 8-bit floats.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    shapes: Mapping[str, tuple[int, ...]]
    tensors: Iterator[tuple[str, Stored]]
    forms: Mapping[str, str] = field(default_factory=dict)
    in_fp8: FP8Weights | None = None


def _gguf(path: Path, max_model_len: int | None, hf_overrides: Mapping[str, Any] | None, runnable: Runnable) -> _Files:
    file = GGUFFile(path)
    config = runnable(config_from_gguf(file, max_model_len, hf_overrides))
    tokenizer = tokenizer_from_gguf(file, config.eos_token_ids)
    return _Files(config, tokenizer, gguf_shapes(file), stream_gguf(file, config), gguf_forms(file))


def _directory(
    path: Path, max_model_len: int | None, hf_overrides: Mapping[str, Any] | None, runnable: Runnable
) -> _Files:
    config, kind = _config_from_directory(path, max_model_len, hf_overrides)
    config = runnable(config)
    tokenizer = tokenizer_from_directory(path, config.eos_token_ids, config.vocab_size)
    in_fp8 = None if kind is None else FP8Weights(path, kind)
    weights = SafetensorsWeights(path) if in_fp8 is None else in_fp8
    return _Files(config, tokenizer, weights.shapes, weights.stream(), in_fp8=in_fp8)


def _keeps_blocks(device: torch.device) -> bool:
    """Whether weights stay in a GGUF file's blocks: on CPUs that have matrix products for them in C++."""
    return device.type == "cpu" and Ops(device).backends["quantised_matmul"] != "reference"


def _quantised(config: ModelConfig, quantization: str | None) -> ModelConfig:
    """The config with the user's override applied: what a checkpoint has in fp8 stays so."""
    return config if quantization is None else replace(config, quantization=quantization)


def _name(source: str | Path) -> str:
    path = Path(source)
    if not path.exists():
        return str(source)
    return path.resolve().name.removesuffix(".gguf")


def _dtype(dtype: torch.dtype | str, device: torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise SettingsError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}", ["dtype"])
    return found


def _config_from_directory(
    path: Path, max_model_len: int | None, hf_overrides: Mapping[str, Any] | None
) -> tuple[ModelConfig, FP8Format | None]:
    """From config.json, and how it says the weights are stored; generation_config.json adds its eos tokens."""
    file = path / "config.json" if path.is_dir() else path
    if not is_there(file):
        raise FileNotFoundError(f"{path} has no config.json")
    hf = read_json(file)
    kind = read_quantization(file, hf)
    config = overridden_config(file, hf, max_model_len, hf_overrides)
    with naming(file, OTHER_MODEL):
        config = _quantised(config, None if kind is None else "fp8")
    generation = file.with_name(GENERATION_CONFIG)
    if path.is_dir() and is_there(generation):
        eos = read_json(generation).get("eos_token_id")
        stops = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not are_token_ids(stops) or not all(0 <= token < config.vocab_size for token in stops):
            raise ModelFileError(generation, f"eos_token_id={str(eos)[:60]} is not of the {config.vocab_size} tokens")
        config = replace(config, eos_token_ids=tuple(dict.fromkeys([*config.eos_token_ids, *stops])))
    return config, kind
