"""Loading: a source and the user's overrides -> a decoder with its weights, its config and its tokeniser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from shadowkv.kvcache.memory.free_memory import free_bytes
from shadowkv.layers.group import ALONE, Group
from shadowkv.load_settings import DTYPES, LOAD_FORMATS
from shadowkv.models.checkpoints.adapter import Adapter
from shadowkv.models.checkpoints.files import naming
from shadowkv.models.checkpoints.fp8 import FP8Weights
from shadowkv.models.checkpoints.safetensors_weights import SafetensorsWeights
from shadowkv.models.checkpoints.stored_weight import Stored
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.decoder import Decoder
from shadowkv.models.directory import config_from_directory, read_sampling
from shadowkv.models.families.registry import family
from shadowkv.models.filling import block_runs, check_shapes, fill, fill_dummy, quantised
from shadowkv.models.gguf.config import config_from_gguf
from shadowkv.models.gguf.file import GGUFFile
from shadowkv.models.gguf.tokenizer import tokenizer_from_gguf
from shadowkv.models.gguf.weights import gguf_forms, gguf_shapes, stream_gguf
from shadowkv.models.quantization import REMEDY
from shadowkv.models.sharding import Shard
from shadowkv.models.sources import HUB, Hub, adapter_of, config_file, is_hub_id, resolve, resolve_tokenizer
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.models.tokenization.tokenizer_files import byte_tokenizer, tokenizer_from_directory
from shadowkv.ops.registry import choose
from shadowkv.ops.scaled_matmul.cuda import LEAST_CAPABILITY
from shadowkv.wording import GIB, OutOfMemory, SettingsError

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
    hub: Hub = HUB,
) -> ModelConfig:
    """ModelConfig of a source without its weights; raises as ``load_model`` does."""
    path = resolve(source, weights=False, hub=hub)
    if path.suffix == ".gguf":
        config = config_from_gguf(GGUFFile(path), max_model_len, hf_overrides)
    else:
        config, _ = config_from_directory(path, max_model_len, hf_overrides)
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
    hub: Hub = HUB,
    tokenizer: str | Path | None = None,
) -> LoadedModel:
    """Loads a model, or this rank's part of it.

    Args:
        source: catalogue name, Hugging Face directory (safetensors), .gguf file, or hub id ``org/name``.
        dtype: of the weights; ``auto`` is bfloat16 on a GPU and float32 on a CPU.
        device: where the weights go.
        load_format: ``auto``, ``safetensors`` (no .gguf file), or ``dummy`` for random weights of the right shapes.
        adapter: directory of a PEFT LoRA adapter to merge.
        hf_overrides: entries that replace those of the model's config, by the names of a config.json. With a
            ``rope_theta`` the longest sequence is ``max_model_len``, as the user says.
        max_model_len: longest sequence that will be run; decides LongRoPE's factors.
        quantization: ``fp8`` stores the weights of projections in 8-bit floats, which fp8 checkpoints have anyway.
        group: the ranks that the model is split across.
        hub: what of the hub is used, where ``source`` is an id there.
        tokenizer: a source whose tokenizer is used instead of the model's own.

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
    name, device = _name(source), torch.device(device)
    weights_dtype, adapter = _dtype(dtype, device), _adapter(source, adapter, load_format)
    # Before anything is fetched or read.
    check_hardware(quantization, device, weights_dtype, "quantization='fp8':", "leave it out")

    def runnable(config: ModelConfig) -> ModelConfig:
        who = f"{source}: its weights are quantised in fp8, and"
        check_hardware(config.quantization, device, weights_dtype, who, REMEDY)
        return _quantised(config, quantization)

    if load_format == "dummy":
        config = runnable(load_config(source, max_model_len, hf_overrides, hub=hub))
        return _dummy(config, weights_dtype, device, group, name, partial(_tokenizer, tokenizer, config, hub))
    if is_hub_id(source):
        # What cannot be run is refused before gigabytes of its weights are fetched.
        runnable(load_config(source, max_model_len, hf_overrides, hub=hub))
    path = _of_format(resolve(source, weights=True, hub=hub), load_format)
    sampling = read_sampling(path) if path.is_dir() else {}
    read = partial(_gguf, stated=_stated(source)) if path.suffix == ".gguf" else _directory
    files = read(path, max_model_len, hf_overrides, runnable)
    tokenizes = files.tokenizer() if tokenizer is None else _tokenizer(tokenizer, files.config, hub)
    config, shapes, tensors = files.config, files.shapes, files.tensors
    may_keep_blocks = config.quantization is None and group.size == 1
    forms, notes = dict(files.forms) if may_keep_blocks and _keeps_blocks(device) else {}, tuple[str, ...]()
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
    fill(model, targets, _with_a_bar(tensors, len(shapes)), shard)
    notes = notes if files.in_fp8 is None else files.in_fp8.notes(quantised(model, targets))
    return LoadedModel(config, shard, model, tokenizes, name, notes, sampling)


def _with_a_bar(tensors: Iterator[tuple[str, Stored]], count: int) -> Iterator[tuple[str, Stored]]:
    """``tensors``, with a progress bar if the output is a terminal."""
    return iter(tqdm(tensors, "loading weights", count, unit="tensor", leave=False, disable=None))


def load_tokenizer(
    source: str | Path,
    *,
    load_format: str = "auto",
    max_model_len: int | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    hub: Hub = HUB,
    tokenizer: str | Path | None = None,
) -> Tokenizer:
    """The tokeniser that ``load_model`` gives, without reading the weights beside it; raises as that does."""
    config = load_config(source, max_model_len, hf_overrides, hub=hub)
    own = None if load_format == "dummy" else source
    return _tokenizer(own if tokenizer is None else tokenizer, config, hub)


def _tokenizer(source: str | Path | None, config: ModelConfig, hub: Hub) -> Tokenizer:
    """The tokenizer of a source, for a model of ``config``; without one a token is a byte, as random weights need."""
    if source is None:
        return byte_tokenizer(config.vocab_size, config.eos_token_ids)
    path = resolve_tokenizer(source, hub)
    if path.suffix == ".gguf":
        return tokenizer_from_gguf(GGUFFile(path), config.eos_token_ids)
    return tokenizer_from_directory(path, config.eos_token_ids, config.vocab_size)


def _of_format(path: Path, load_format: str) -> Path:
    if path.suffix == ".gguf" and load_format == "safetensors":
        raise SettingsError(f"load_format='safetensors': {path} is a GGUF file; leave it out", ["load_format"])
    return path


def _adapter(source: str | Path, adapter: str | Path | None, load_format: str) -> str | Path | None:
    """The adapter to merge: the user's, or that of a catalogue model."""
    own = adapter_of(source)
    if adapter is None:
        return own
    if own is not None:
        raise SettingsError(f"{source} has an adapter of its own: leave out adapter={str(adapter)!r}", ["adapter"])
    if load_format == "dummy":
        raise SettingsError("an adapter has no meaning with load_format='dummy'", ["load_format"])
    return adapter


def _stated(source: str | Path) -> Path | None:
    """The config of a catalogue model with an adapter: its base's file does not say what that was trained for."""
    return None if adapter_of(source) is None else config_file(str(source))


def _dummy(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
    name: str,
    tokenizer: Callable[[], Tokenizer],
) -> LoadedModel:
    """A model of random weights."""
    shard = Shard(config, group.rank, group.size)
    check_memory(Decoder(shard.config, dtype, "meta", group=group), device)
    model = Decoder(shard.config, dtype, device, group=group)
    fill_dummy(model)
    return LoadedModel(config, shard, model, tokenizer(), name)


@dataclass(frozen=True)
class _Files:
    """What a model's files say, before any weight is read.

    Attributes:
        tokenizer: reads it.
        shapes: of all weights, by their names in the files.
        tensors: the weights, read one after another.
        forms: blocks of quantised numbers that weights are stored in, by their names.
        in_fp8: the weights, if they are stored in 8-bit floats.
    """

    config: ModelConfig
    tokenizer: Callable[[], Tokenizer]
    shapes: Mapping[str, tuple[int, ...]]
    tensors: Iterator[tuple[str, Stored]]
    forms: Mapping[str, str] = field(default_factory=dict)
    in_fp8: FP8Weights | None = None


def _gguf(
    path: Path,
    max_model_len: int | None,
    hf_overrides: Mapping[str, Any] | None,
    runnable: Runnable,
    stated: Path | None,
) -> _Files:
    """``stated`` is a config.json that is read instead of the file's own config."""
    file = GGUFFile(path)
    if stated is None:
        config = runnable(config_from_gguf(file, max_model_len, hf_overrides))
    else:
        config = runnable(config_from_directory(stated, max_model_len, hf_overrides)[0])
    tokenizer = partial(tokenizer_from_gguf, file, config.eos_token_ids)
    return _Files(config, tokenizer, gguf_shapes(file), stream_gguf(file, config), gguf_forms(file))


def _directory(
    path: Path, max_model_len: int | None, hf_overrides: Mapping[str, Any] | None, runnable: Runnable
) -> _Files:
    config, kind = config_from_directory(path, max_model_len, hf_overrides)
    config = runnable(config)
    tokenizer = partial(tokenizer_from_directory, path, config.eos_token_ids, config.vocab_size)
    in_fp8 = None if kind is None else FP8Weights(path, kind)
    weights = SafetensorsWeights(path) if in_fp8 is None else in_fp8
    return _Files(config, tokenizer, weights.shapes, weights.stream(), in_fp8=in_fp8)


def _keeps_blocks(device: torch.device) -> bool:
    """Whether weights stay in a GGUF file's blocks: on CPUs that have matrix products for them in C++."""
    return device.type == "cpu" and choose("quantised_matmul", device).backend != "reference"


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
    named = getattr(torch, dtype, None)
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise SettingsError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}", ["dtype"])
    return named


def check_hardware(quantization: str | None, device: torch.device, dtype: torch.dtype, who: str, remedy: str) -> None:
    """Raises SettingsError if weights cannot run as they are quantised: for whom, why, and what to do."""
    reason = unfit(device, dtype) if quantization == "fp8" else None
    if reason is not None:
        raise SettingsError(f"{who} {reason}; {remedy}", ["dtype", "quantization"])


def check_memory(outline: Decoder, device: torch.device) -> None:
    """Raises MemoryError if the weights, wherever they come from, need more than is free.

    Missing host memory would be granted, and the process killed while it is filled.
    """
    need, free = outline.num_bytes, free_bytes(device)
    if need > free:
        plain = sum(parameter.nbytes for parameter in outline.parameters() if parameter.dtype == torch.float32)
        halved = need - plain // 2 <= free
        advice = ("pass dtype='bfloat16', " if halved else "") + "use a smaller model or free memory"
        raise OutOfMemory(
            f"the weights need {need / GIB:.2f} GiB as {outline.weights_in_words} on {device}, "
            f"{free / GIB:.2f} GiB are free; {advice}",
            ["dtype"],
        )


def unfit(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a model cannot run there with fp8 weights and everything else in ``dtype``; None if it can."""
    least = "fp8 needs a GPU of compute capability {}.{} or more (Ada, Hopper or newer)".format(*LEAST_CAPABILITY)
    if device.type != "cuda":
        return f"{least}, and the device is {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"{least}, and {torch.cuda.get_device_name(device)} ({device}) has {capability[0]}.{capability[1]}"
    if dtype != torch.bfloat16:
        return f"fp8 goes with dtype='bfloat16', not {str(dtype).removeprefix('torch.')}"
    return None
