"""Loads a model: from a source and the user's overrides to a decoder with its weights, config and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from shadowkv.kvcache.memory.free_memory import free_bytes
from shadowkv.layers.group import ALONE, Group
from shadowkv.load_settings import DEQUANTIZED, DTYPES, LOAD_FORMATS, QUANTIZATIONS
from shadowkv.models import storage
from shadowkv.models.checkpoints.adapter import Adapter
from shadowkv.models.checkpoints.experts import SeparateExperts
from shadowkv.models.checkpoints.files import OTHER_MODEL, naming
from shadowkv.models.checkpoints.quantized.format import Format
from shadowkv.models.checkpoints.quantized.weights import QuantizedWeights
from shadowkv.models.checkpoints.reading import Reading, read_ahead
from shadowkv.models.checkpoints.safetensors_weights import SafetensorsWeights
from shadowkv.models.checkpoints.stored_weight import FP8_ROWS, Stored
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.decoder import Decoder
from shadowkv.models.directory import config_from_directory, read_sampling
from shadowkv.models.downloads import HUB, Hub
from shadowkv.models.filling import check_shapes, fill, fill_dummy, held, quantized, stored_row_blocks
from shadowkv.models.gguf.config import config_from_gguf
from shadowkv.models.gguf.file import GGUFFile
from shadowkv.models.gguf.tokenizer import tokenizer_from_gguf
from shadowkv.models.gguf.weights import gguf_forms, gguf_readings, gguf_shapes
from shadowkv.models.registry import draft_head_names, family, has_interleaved_experts, text_weight, with_draft_head
from shadowkv.models.sharding import Shard
from shadowkv.models.sources import adapter_of, config_file, is_hub_id, resolve, resolve_tokenizer
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.models.tokenization.tokenizer_files import byte_tokenizer, tokenizer_from_directory
from shadowkv.ops.quantized.rows import Form
from shadowkv.ops.scaled_matmul.cuda import MIN_CAPABILITY
from shadowkv.wording import GIB, OutOfMemory, SettingsError, counted

Runnable = Callable[[ModelConfig, Mapping[str, Form]], ModelConfig]
"""Returns the config to run, given the files' config and the forms of their quantized weights; raises ValueError if the
model cannot be run."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        config: the config with the user's overrides applied.
        shard: this rank's part of the model; the whole model if it is on one device.
        model: the decoder of this rank's part, on its device.
        tokenizer: the model's tokenizer, or a byte tokenizer for dummy weights.
        name: the catalogue name or hub id that was requested, or the last part of its path.
        notes: unexpected conversions of weights, one line each.
        sampling: sampling parameters from the model's generation_config.json.
        path: the model's file or folder; None for dummy weights.
    """

    config: ModelConfig
    shard: Shard
    model: Decoder
    tokenizer: Tokenizer
    name: str
    notes: tuple[str, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    path: Path | None = None


def load_config(
    source: str | Path,
    max_model_len: int | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    quantization: str | None = None,
    hub: Hub = HUB,
) -> ModelConfig:
    """ModelConfig of a source without its weights; raises as ``load_model`` does."""
    return load_plan(source, max_model_len, hf_overrides, quantization, hub)[0]


def load_plan(
    source: str | Path,
    max_model_len: int | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    quantization: str | None = None,
    hub: Hub = HUB,
    draft_head: bool = False,
) -> tuple[ModelConfig, dict[str, Form]]:
    """Returns the config of ``load_config``, and the forms of quantized weights by name, as far as configs show them.

    Checkpoints in 8-bit floats are planned for a GPU with 8-bit arithmetic, on which only experts keep their form.
    ``draft_head`` is as for ``load_model``.
    """
    path, config, format = _stated_by(source, max_model_len, hf_overrides, hub)
    if draft_head:
        config = _with_draft_head(config, path)
    if quantization == DEQUANTIZED:
        return config, {}
    if path.suffix == ".gguf":
        file = GGUFFile(path)
        forms = gguf_forms(file)
        if config.experts is not None:
            forms = _separate(config, gguf_shapes(file), forms, in_gguf=True).forms
    else:
        forms = storage.planned_forms(config, format, quantization)
    if quantization == "fp8" or (quantization is None and storage.is_fp8(forms)):
        with naming(path, OTHER_MODEL):
            return replace(config, quantization="fp8"), storage.of_experts(forms)
    return config, forms


def _stated_by(
    source: str | Path, max_model_len: int | None, hf_overrides: Mapping[str, Any] | None, hub: Hub
) -> tuple[Path, ModelConfig, Format | None]:
    """Returns the path of a source's config, the config, and the format of the weights. The format is None for GGUF
    files and for weights that are not quantized."""
    path = resolve(source, weights=False, hub=hub)
    if path.suffix == ".gguf":
        return path, config_from_gguf(GGUFFile(path), max_model_len, hf_overrides), None
    return path, *config_from_directory(path, max_model_len, hf_overrides)


def plan_on(
    device: torch.device, dtype: torch.dtype, config: ModelConfig, forms: Mapping[str, Form]
) -> tuple[ModelConfig, dict[str, Form]]:
    """Adapts ``load_plan``'s result to a device. If the device has no 8-bit arithmetic, the config is changed so that
    projections compute in ``dtype``. Forms that the device dequantizes are left out."""
    if config.quantization is not None and unfit(device, dtype) is not None:
        config, forms = replace(config, quantization=None), dict.fromkeys(storage.projections(config), FP8_ROWS)
    return config, storage.kept(forms, config, dtype, device)


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
    expert_parallel: bool = False,
    hub: Hub = HUB,
    tokenizer: str | Path | None = None,
    draft_head: bool = False,
    check: Callable[[Shard], object] = lambda shard: None,
) -> LoadedModel:
    """Loads a model, or this rank's part of it.

    Args:
        source: catalogue name, Hugging Face directory (safetensors), .gguf file, or hub id ``org/name``.
        dtype, device: of the weights; ``auto`` is bfloat16 on a GPU and float32 on a CPU.
        load_format: ``auto``, ``safetensors`` (.gguf files are refused), or ``dummy`` for random weights of the right
            shapes.
        adapter: directory of a PEFT LoRA adapter to merge.
        hf_overrides: entries that replace those of the model's config, named as in config.json. If they have a
            ``rope_theta``, ``max_model_len`` can exceed the limit in the config.
        max_model_len: longest sequence that will be run; decides LongRoPE's factors.
        quantization: ``fp8`` stores the weights of projections in 8-bit floats. Without it, weights of fp8 checkpoints
            are stored so, too, if the GPU has 8-bit arithmetic. ``none`` dequantizes weights of any checkpoint. A name
            in ``SHAPES`` sets the form of random weights; files must be quantized with the method of that name.
        group: the ranks that the model is split across.
        expert_parallel: whether each rank has some whole experts instead of a part of every expert.
        hub: settings of the hub, if ``source`` is a hub id.
        tokenizer: a source whose tokenizer replaces the model's own.
        draft_head: whether to load the layer that drafts tokens (``Decoder.draft_head``).
        check: gets the part of the model to load, and may raise, before weights are downloaded or read.

    Raises:
        FileNotFoundError: the source or files of it do not exist, or there are only pickled weights.
        ValueError: the config cannot be run, ``max_model_len`` is too long, tensors are missing or left over, or
            ``quantization`` is fp8 and the device does not support it. A file that is corrupt, or quantized in an
            unsupported way, raises ModelFileError, whose message is one line with the file's name.
        OSError: a file cannot be read, or a download failed.
        MemoryError: the weights need more memory than is free on ``device``; raised before any are read or created.
    """
    if load_format not in LOAD_FORMATS:
        raise SettingsError(f"load_format={load_format!r} is not one of {', '.join(LOAD_FORMATS)}", ["load_format"])
    name, device = _name(source), torch.device(device)
    weights_dtype, adapter = _dtype(dtype, device), _adapter(source, adapter, load_format)
    check_quantization(quantization, device, weights_dtype)  # before any download

    def runnable(config: ModelConfig, forms: Mapping[str, Form]) -> ModelConfig:
        in_fp8 = quantization != DEQUANTIZED and storage.is_fp8(forms) and unfit(device, weights_dtype) is None
        return replace(config, quantization="fp8") if in_fp8 or quantization == "fp8" else config

    def part(config: ModelConfig) -> Shard:
        check(shard := Shard(config, group.rank, group.size, expert_parallel))
        return shard

    if load_format == "dummy":
        config, forms = plan_on(
            device, weights_dtype, *load_plan(source, max_model_len, hf_overrides, quantization, hub, draft_head)
        )
        read_tokenizer = partial(_tokenizer, tokenizer, config, hub)
        return _dummy(part(config), forms, weights_dtype, device, group, name, read_tokenizer)
    if is_hub_id(source):
        _check_stated(source, max_model_len, hf_overrides, hub, draft_head, quantization, part)
    path = _of_format(resolve(source, weights=True, hub=hub), load_format)
    sampling = read_sampling(path) if path.is_dir() else {}
    in_gguf = path.suffix == ".gguf"
    read = partial(_gguf, stated=_stated(source)) if in_gguf else _directory
    files = read(path, max_model_len, hf_overrides, runnable, device.type == "cuda", draft_head)
    with naming(path):
        files = _with_separate_experts(files, in_gguf=in_gguf)
    storage.check_stated(quantization, "GGUF" if in_gguf else files.method, str(source))
    tokenizes = files.tokenizer() if tokenizer is None else _tokenizer(tokenizer, files.config, hub)
    shard = part(files.config)
    model, notes = _load(files, path, adapter, weights_dtype, device, shard, group, quantization == DEQUANTIZED)
    return LoadedModel(files.config, shard, model, tokenizes, name, notes, sampling, path)


def _check_stated(
    source: str | Path,
    max_model_len: int | None,
    hf_overrides: Mapping[str, Any] | None,
    hub: Hub,
    draft_head: bool,
    quantization: str | None,
    part: Callable[[ModelConfig], Shard],
) -> None:
    """Refuses models that cannot be run or split before gigabytes of weights are downloaded. Arguments as for
    ``load_model``; ``part`` makes this rank's part."""
    stated, config, format = _stated_by(source, max_model_len, hf_overrides, hub)
    part(_with_draft_head(config, stated) if draft_head else config)
    storage.check_stated(quantization, None if format is None else format.method, str(source))


def _load(
    files: _Files,
    path: Path,
    adapter: str | Path | None,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
    group: Group,
    dequantized: bool,
) -> tuple[Decoder, tuple[str, ...]]:
    """Loads a rank's part of a model. Returns it with notes on unexpected conversions of weights, one line each. With
    ``dequantized``, all weights are in ``dtype``."""
    config, shapes = files.config, files.shapes
    forms = {} if dequantized else storage.kept(files.forms, config, dtype, device)
    changed = list[str]()
    notes = [*files.notes]
    # As many errors as possible are found before anything as large as the weights is allocated or read.
    if config.draft_head and (names := draft_head_names(config.architecture)) is not None:
        of_head = names.prefixes(config)
        if not any(name.startswith(of_head) for name in shapes):
            raise _no_draft_head(path, f"the files lack the layer that drafts tokens, {of_head[0]}*")
    targets, outline = family(config.architecture).targets(config), Decoder(config, dtype, "meta")
    with naming(path, "use the config that belongs to the weights, and all of their files"):
        check_shapes(outline, targets, shapes)
    wanted = held(targets, shard)
    tensors = files.tensors(wanted)
    if adapter is not None:
        merge = Adapter(Path(adapter))
        merge.check(shapes)
        tensors = merge.merged(tensors)
        if changed := [weight for weight in merge.changed if forms.pop(weight, None)]:
            notes.append(f"{len(changed)} weights that the adapter changes are dequantized: {changed[0]}, ...")
            # Forms are chosen again, because all experts of a projection must have the same form.
            forms = storage.kept(forms, config, dtype, device)
    row_blocks = stored_row_blocks(outline, targets, forms, shard)
    check_memory(Decoder(shard.config, dtype, "meta", row_blocks, group), device)
    model = Decoder(shard.config, dtype, device, row_blocks, group)
    fill(model, targets, _with_a_bar(tensors, len(wanted)), shard)
    if device.type == "cuda":
        model.pack()
    in_fp8 = quantized(model, targets)
    if in_fp8 and files.method is not None:
        notes += storage.in_fp8(files.forms, in_fp8)
    as_they_are = {*forms, *changed, *in_fp8}
    others = {weight: form for weight, form in files.forms.items() if weight not in as_they_are}
    asked = DEQUANTIZED if dequantized else config.quantization
    notes += storage.dequantized(others, shapes, dtype, device, asked)
    return model, tuple(notes)


def _with_draft_head(config: ModelConfig, path: Path) -> ModelConfig:
    """Returns the config with a draft head. Raises SettingsError if none can be read from the model of ``path``."""
    if path.suffix == ".gguf":
        raise _no_draft_head(path, "layers that draft tokens are read from safetensors files only")
    try:
        return with_draft_head(config)
    except ValueError as error:
        raise _no_draft_head(path, str(error)) from error


def _no_draft_head(path: Path, reason: str) -> SettingsError:
    advice = "Use files with such a layer, or another method of speculative decoding"
    return SettingsError(f"method='mtp': {path}: {reason}. {advice}", ["speculative_config"])


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
    """The tokenizer that ``load_model`` returns, without reading the weights; raises as ``load_model`` does."""
    _, config, _ = _stated_by(source, max_model_len, hf_overrides, hub)
    own = None if load_format == "dummy" else source
    return _tokenizer(own if tokenizer is None else tokenizer, config, hub)


def _tokenizer(source: str | Path | None, config: ModelConfig, hub: Hub) -> Tokenizer:
    """Returns the tokenizer of a source, for a model of ``config``. If ``source`` is None, as for random weights, it
    returns a byte tokenizer."""
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
    """The adapter to merge: the user's, or a catalogue model's."""
    own = adapter_of(source)
    if adapter is None:
        return own
    if own is not None:
        raise SettingsError(f"{source} has an adapter of its own: leave out adapter={str(adapter)!r}", ["adapter"])
    if load_format == "dummy":
        raise SettingsError("an adapter has no meaning with load_format='dummy'", ["load_format"])
    return adapter


def _stated(source: str | Path) -> Path | None:
    """Returns the config.json of a catalogue model with an adapter; None for other sources. The base model's GGUF file
    lacks the settings that the adapter was trained for."""
    return None if adapter_of(source) is None else config_file(str(source))


def _dummy(
    shard: Shard,
    forms: Mapping[str, Form],
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
    name: str,
    tokenizer: Callable[[], Tokenizer],
) -> LoadedModel:
    """A model of random weights."""
    row_blocks = storage.planned_row_blocks(shard, forms, dtype)
    check_memory(Decoder(shard.config, dtype, "meta", row_blocks, group), device)
    model = Decoder(shard.config, dtype, device, row_blocks, group)
    fill_dummy(model)
    if device.type == "cuda":
        model.pack()
    return LoadedModel(shard.whole, shard, model, tokenizer(), name)


@dataclass(frozen=True)
class _Files:
    """The content of a model's files, before any weight is read.

    Attributes:
        tokenizer: reads the tokenizer.
        shapes: shapes of all weights, by their names in the files.
        readings: the tensors of the files, to be read.
        forms: forms of quantized weights, by their names.
        method: quantization method of a directory's weights; None for plain weights and GGUF files.
        notes: unexpected conversions of weights, one line each.
        separate: splits tensors of several experts; None without experts.
    """

    config: ModelConfig
    tokenizer: Callable[[], Tokenizer]
    shapes: Mapping[str, tuple[int, ...]]
    readings: Iterable[Reading]
    forms: Mapping[str, Form] = field(default_factory=dict)
    method: str | None = None
    notes: tuple[str, ...] = ()
    separate: SeparateExperts | None = None

    def tensors(self, wanted: Collection[str]) -> Iterator[tuple[str, Stored]]:
        """Yields the ``wanted`` weights with their names. Weights are read ahead of their use."""
        if self.separate is not None:
            return self.separate.tensors(self.readings, wanted)
        return read_ahead(reading for reading in self.readings if reading.name in wanted)


def _gguf(
    path: Path,
    max_model_len: int | None,
    hf_overrides: Mapping[str, Any] | None,
    runnable: Runnable,
    pinned: bool,
    draft_head: bool,
    stated: Path | None,
) -> _Files:
    """Opens a GGUF model. ``stated`` is a config.json that replaces the file's own config; None keeps it."""
    if draft_head:
        raise _no_draft_head(path, "layers that draft tokens are read from safetensors files only")
    file = GGUFFile(path)
    if stated is None:
        config = runnable(config_from_gguf(file, max_model_len, hf_overrides), {})
    else:
        config = runnable(config_from_directory(stated, max_model_len, hf_overrides)[0], {})
    tokenizer = partial(tokenizer_from_gguf, file, config.eos_token_ids)
    return _Files(config, tokenizer, gguf_shapes(file), gguf_readings(file, config, pinned=pinned), gguf_forms(file))


def _directory(
    path: Path,
    max_model_len: int | None,
    hf_overrides: Mapping[str, Any] | None,
    runnable: Runnable,
    pinned: bool,
    draft_head: bool,
) -> _Files:
    config, format = config_from_directory(path, max_model_len, hf_overrides)
    if draft_head:
        config = _with_draft_head(config, path)
    tokenizer = partial(tokenizer_from_directory, path, config.eos_token_ids, config.vocab_size)
    if format is None:
        plain = SafetensorsWeights(path, renamed=text_weight(config))
        return _Files(runnable(config, {}), tokenizer, plain.shapes, plain.readings(pinned=pinned))
    weights = QuantizedWeights(path, format, text_weight(config))
    with naming(path, OTHER_MODEL):
        config = runnable(config, weights.forms)
    notes = []
    if weights.scattered:
        columns = f"{counted(len(weights.scattered), 'weight')} with groups of columns in the order of activations"
        notes.append(f"{columns} (desc_act) are dequantized: {weights.scattered[0]}, ...")
    if weights.of_caches:
        notes.append(f"scales of keys and values in the files are not used: {weights.of_caches[0]}, ...")
    return _Files(
        config, tokenizer, weights.shapes, weights.readings(pinned=pinned), weights.forms, format.method, tuple(notes)
    )


def _with_separate_experts(files: _Files, *, in_gguf: bool) -> _Files:
    """``files`` with one weight per expert, and without the layers that draft tokens."""
    if files.config.experts is None:
        return files
    separate, notes = _separate(files.config, files.shapes, files.forms, in_gguf=in_gguf), files.notes
    if separate.left_out:
        count = counted(len(separate.left_out), "weight")
        notes = (*notes, f"{count} of layers that draft tokens are not used: {separate.left_out[0]}, ...")
    return replace(
        files,
        shapes=separate.shapes,
        forms=separate.forms,
        notes=notes,
        separate=separate,
    )


def _separate(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], forms: Mapping[str, Form], *, in_gguf: bool
) -> SeparateExperts:
    assert config.experts is not None
    drafting = range(config.num_layers + config.draft_head, config.num_layers + config.draft_layers)
    interleaved = not in_gguf and has_interleaved_experts(config.architecture)
    return SeparateExperts(shapes, forms, config.experts.routing.experts, drafting, interleaved)


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


def check_quantization(quantization: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Raises SettingsError for unknown names, and for fp8 if the device or the dtype does not support it."""
    if quantization not in (None, *QUANTIZATIONS):
        reason = f"quantization={quantization!r} is not one of {', '.join(QUANTIZATIONS)}"
        raise SettingsError(reason, ["quantization"])
    if quantization == "fp8" and (why := unfit(device, dtype)) is not None:
        raise SettingsError(f"quantization='fp8': {why}; leave it out", ["dtype", "quantization"])


def check_memory(outline: Decoder, device: torch.device) -> None:
    """Raises MemoryError if the weights need more memory than is free.

    Without this check, the allocation would succeed in host memory, and the process would be killed while it fills the
    memory.
    """
    need = outline.num_packed_bytes if device.type == "cuda" else outline.num_bytes
    free = free_bytes(device)
    if need > free:
        plain = sum(parameter.nbytes for parameter in outline.parameters() if parameter.dtype == torch.float32)
        halved = need - plain // 2 <= free
        advice = ("pass dtype='bfloat16', " if halved else "") + "use a smaller model or free memory"
        raise OutOfMemory(
            f"the weights need {need / GIB:.2f} GiB as {outline.weights_description} on {device}, "
            f"{free / GIB:.2f} GiB are free; {advice}",
            ["dtype"],
        )


def unfit(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a model with fp8 weights and other weights in ``dtype`` cannot run on a device; None if it can."""
    least = "fp8 needs a GPU of compute capability {}.{} or more (Ada, Hopper or newer)".format(*MIN_CAPABILITY)
    if device.type != "cuda":
        return f"{least}, and the device is {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"{least}, and {torch.cuda.get_device_name(device)} ({device}) has {capability[0]}.{capability[1]}"
    if dtype != torch.bfloat16:
        return f"fp8 goes with dtype='bfloat16', not {str(dtype).removeprefix('torch.')}"
    return None
