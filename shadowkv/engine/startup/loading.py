"""Loads the parts of an engine: device, model, sampling defaults, ops, and a KV cache sized to the memory. ``Engine``
and the tensor-parallel ranks call it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shadowkv.engine.config import EngineConfig, check_states
from shadowkv.engine.execution.fused_layers import FusedLayers
from shadowkv.engine.execution.sampler import Sampler
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.startup.crossover import dense_below
from shadowkv.engine.startup.sizing import (
    DEFAULT_UTILIZATION,
    describe_prefixes,
    head_bytes,
    in_gib,
    likely_cache_bytes,
    size_cache,
)
from shadowkv.field_types import wrong_json_types
from shadowkv.installation import building_cpu, building_cuda
from shadowkv.kvcache.case import case_of, choose_ops
from shadowkv.kvcache.codecs import with_names
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.parts import describe, prefill_strategy
from shadowkv.kvcache.plugins import load_installed
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import FETCH_BUFFER
from shadowkv.kvcache.recurrent.layout import RING, StateSettings
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.layers.group import ALONE, Group
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.decoder import Decoder
from shadowkv.models.directory import GENERATION_CONFIG, OVERRIDES, read_sampling
from shadowkv.models.downloads import Hub
from shadowkv.models.known import advice
from shadowkv.models.loader import LoadedModel, load_model, load_tokenizer
from shadowkv.models.sharding import Shard
from shadowkv.models.tokenization.chat_template import template_source
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.ops.apply_rope.tables import RopeConfig
from shadowkv.ops.registry import LIBRARIES, Ops, choose
from shadowkv.wording import GIB, SettingsError, counted

logger = logging.getLogger(__name__)


def load_engine_parts(
    config: EngineConfig,
    loaded: LoadedModel | None = None,
    *,
    group: Group = ALONE,
    device: torch.device | None = None,
    make: Callable[..., KVCache] = KVCache,
    backends: Mapping[str, str] | None = None,
) -> tuple[LoadedModel, KVCache, list[str]]:
    """Loads the model and makes the cache. Returns both, and lines that describe them and the number of sequences that
    fit.

    Raises ValueError for invalid settings, MemoryError if not even one sequence fits.

    Args:
        loaded: the model, if it is already loaded.
        group: the ranks that share the model. Only this rank's part is loaded.
        device: this rank's device; None for the config's.
        make: makes the cache, from the arguments of ``KVCache``.
        backends: backend by op name, for ops of layers, cache and sampler. The backends of all other ops are chosen
            automatically.
    """
    device = device or device_of(config.device)
    loaded = loaded or load_for_engine(config, group, device)
    dtype, model = loaded.model.dtype, loaded.shard.config
    layout = first_layout(config, loaded.shard, dtype, device)
    if layout.spec.prefill is None:
        try:
            prefill = default_prefill(layout, loaded.config.rope, device, backends)
            layout = layout.with_fields(prefill=group.agree(prefill))
        except ValueError as error:
            raise config.refused_policy(error) from error
    if layout.spec.compresses and layout.spec.dense_below is None:
        cache_bytes = likely_cache_bytes(config, loaded.model.num_bytes, device)
        # Drafts save time at the same lengths at which selecting steps do, so the crossover is computed for selecting
        # steps.
        selecting = layout.with_fields(drafts=False)
        below = dense_below(model, selecting, device.type, config.max_num_seqs, cache_bytes)
        layout = layout.with_fields(dense_below=group.agree(below))
    slots = config.max_num_seqs + config.max_cached_seqs
    memory, max_model_len = size_cache(config, layout, slots, device, model)
    memory, max_model_len = Blocks(group.least(memory)), group.least({"tokens": max_model_len})["tokens"]
    layout = layout.resized(max_model_len)
    ops = give_ops(loaded, layout, device, backends, config.attention_backend)
    cache = make(layout, loaded.config.rope, slots=slots, memory=memory, ops=ops, device=device)
    return loaded, cache, _describe(config, loaded, cache)


def first_layout(config: EngineConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> Layout:
    """Returns the layout of the cache of ``shard``'s model, before the defaults that depend on kernels and on memory
    are chosen. No weights are needed. Raises SettingsError for settings that the model or the policy refuses."""
    spec = config.spec()
    try:
        spec = shard.policy(spec)
    except ValueError as error:
        raise config.refused_policy(error) from error
    max_model_len = config.max_model_len or shard.whole.max_position
    fetch_buffer = config.fetch_buffer
    if fetch_buffer is None:  # a CPU reads both tiers equally fast, so a buffer would only cost time
        fetch_buffer = FETCH_BUFFER if device.type == "cuda" else 0.0
    shape = shard.config.shape
    layout = Layout(spec, shape, dtype, max_model_len, fetch_buffer, state_settings(config, shape))
    config.check_drafts(layout)
    check_quality_meter(config, layout)
    return layout


def check_quality_meter(config: EngineConfig, layout: Layout) -> None:
    """Raises SettingsError if there is a quality meter, but steps with a cache of ``layout`` cannot be measured."""
    if not config.quality_meter:
        return
    asked = f"quality_meter={config.quality_meter}"
    if layout.recurrent is not None:
        reason = "this model has recurrent states, which the meter's steps would change; leave the flag out"
        raise SettingsError(f"{asked}: {reason}", ["quality_meter"])
    if layout.shape.indexed:
        reason = "this model's own indexer says how much a step selects, so there is no budget to measure"
        raise SettingsError(f"{asked}: {reason}; leave the flag out", ["quality_meter"])
    if not layout.spec.selects:
        reason = "attends to every token; the meter needs a policy that selects tokens in every step, such as turbo"
        raise SettingsError(f"{asked}: kv={config.policy!r} {reason}", ["quality_meter", "kv"])


def state_settings(config: EngineConfig, model: ModelShape) -> StateSettings:
    """Returns the settings of recurrent states. Without prefix caching, no checkpoints of states are kept. Raises
    SettingsError if ``config`` has a setting of recurrent states, but the model has no such states."""
    dtype = config.mamba_ssm_cache_dtype
    check_states(model, max_mamba_checkpoints=config.max_mamba_checkpoints, mamba_ssm_cache_dtype=dtype)
    checkpoints = config.max_mamba_checkpoints if config.enable_prefix_caching else 0
    return StateSettings.of(checkpoints, dtype, config.drafted_states)


def give_ops(
    loaded: LoadedModel,
    layout: Layout,
    device: torch.device,
    backends: Mapping[str, str] | None = None,
    attention_backend: str = "auto",
) -> Ops:
    """Chooses the ops of an engine (``ops_for``) and gives them to the model's layers. The caller makes the cache of
    ``layout`` and the sampler with the same ops."""
    ops = ops_for(loaded.model, layout, loaded.config.rope, device, backends, attention_backend)
    if "flashinfer" in {ops.backends[name] for name in ops.called}:
        logger.info("FlashInfer compiles its kernels on first use on this machine, which takes one or two minutes each")
    loaded.model.use(ops)
    return ops


def ops_for(
    model: Decoder,
    layout: Layout,
    rope: RopeConfig,
    device: torch.device,
    backends: Mapping[str, str] | None = None,
    attention_backend: str = "auto",
) -> Ops:
    """Chooses the ops that an engine calls: those of the model's layers, the cache and the sampler. Loads installed
    plugins first. ``backends`` and ``attention_backend`` are as in ``choose_ops``. Raises what ``choose_ops``
    raises."""
    if (error := load_installed()) is not None:
        logger.warning("%s; what it would register is missing", error)
    also = model.called_ops.union(Sampler.calls, FusedLayers.calls if device.type == "cpu" else ())
    return choose_ops(layout, rope, device, also, backends, attention_backend)


def graphs_up_to(config: EngineConfig, cache: KVCache) -> int | None:
    """Returns the maximum number of rows of a decode step that runs as a CUDA graph. Returns None if decode steps are
    not CUDA graphs."""
    graphs = cache.device.type == "cuda" and not config.enforce_eager and not cache.ops.synchronising
    return config.max_rows if graphs else None


def default_prefill(
    layout: Layout, rope: RopeConfig, device: torch.device, backends: Mapping[str, str] | None = None
) -> str:
    """Returns the default of ``prefill``: sparse on a GPU with kernels for it, else dense. ``backends`` are as in
    ``choose_ops``. Raises what ``choose_ops`` raises."""
    if device.type != "cuda":
        return "dense"
    load_installed()  # a plugin can have a kernel; ``ops_for`` reports the plugins that cannot be loaded
    layout, given = layout.with_fields(prefill="sparse"), backends or {}
    case, ops = case_of(layout, rope, device), prefill_strategy(layout.spec).ops
    chosen = (choose(name, device, (case,), given.get(name)).backend for name in ops)
    return "dense" if "reference" in chosen else "sparse"


def load_from_config(
    config: EngineConfig,
    group: Group = ALONE,
    device: torch.device | None = None,
    check: Callable[[Shard], object] = lambda shard: None,
) -> LoadedModel:
    """Loads the model of ``config``, or a rank's part of it, on ``device`` or the config's device. ``check`` is as for
    ``load_model``. Raises ValueError for invalid settings."""
    device = device or device_of(config.device)
    loaded = load_model(
        config.model,
        dtype=_dtype(config.dtype, device),
        device=device,
        load_format=config.load_format,
        adapter=config.adapter,
        hf_overrides=config.overrides,
        max_model_len=config.max_model_len,
        quantization=config.quantization,
        group=group,
        expert_parallel=config.enable_expert_parallel,
        hub=_hub(config),
        tokenizer=config.tokenizer,
        draft_head=config.drafts_with_head,
        check=check,
    )
    _give_template(loaded.tokenizer, config)
    return loaded


def load_for_engine(config: EngineConfig, group: Group = ALONE, device: torch.device | None = None) -> LoadedModel:
    """Loads a model as ``load_from_config`` does. Settings that an engine of ``config`` refuses, as far as the model's
    config tells, raise ValueError before weights are downloaded or read."""
    device = device or device_of(config.device)
    config.spec()  # raises for an unknown policy before a config is fetched
    if config.attention_backend in LIBRARIES:  # raises if the library is not installed
        Ops(device, attention_backend=config.attention_backend)
    check = partial(first_layout, config, dtype=_dtype(config.dtype, device), device=device)
    return load_from_config(config, group, device, check)


def tokenizer_from_config(config: EngineConfig) -> Tokenizer:
    """Loads only the tokenizer of the model of ``config``. Raises what loading the model raises."""
    tokenizer = load_tokenizer(
        config.model,
        load_format=config.load_format,
        max_model_len=config.max_model_len,
        hf_overrides=config.overrides,
        hub=_hub(config),
        tokenizer=config.tokenizer,
    )
    _give_template(tokenizer, config)
    return tokenizer


def _hub(config: EngineConfig) -> Hub:
    return Hub(config.revision, config.download_dir)


def _give_template(tokenizer: Tokenizer, config: EngineConfig) -> None:
    if config.chat_template is None:
        return
    try:
        tokenizer.use_template(template_source(config.chat_template))
    except (ValueError, OSError) as error:
        raise SettingsError(f"chat_template={config.chat_template!r:.200}: {error}", ["chat_template"]) from error


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _describe(config: EngineConfig, loaded: LoadedModel, cache: KVCache) -> list[str]:
    total, limit = cache.total, cache.max_model_len
    size = loaded.shard.size
    ranks = f", rank 0 of {size}" if size > 1 else ""
    lines = [
        f"model   {loaded.name}: {counted(loaded.config.num_layers, 'layer')}, {_experts(loaded.config)}"
        f"{loaded.model.weights_description} on {cache.device}{ranks}",
        *([f"experts {line}"] if (line := loaded.shard.experts_note) else []),
        *([f"advice  {line}"] if (line := advice(config.model)) else []),
        *(f"weights {note}" for note in loaded.notes),
        *([f"tables  {line}"] if (line := loaded.model.tables_description) else []),
        f"policy  {config.policy}: {describe(cache.spec, cache.shape)}",
        *(
            f"windows {len(group.layers)} of {counted(group.model_layers, 'layer')} attend to the newest "
            f"{counted(group.window, 'token')}, exact under every policy"
            for group in cache.layout.groups
            if group.window is not None
        ),
        *_recurrent(cache),
        *_drafts(config, loaded, cache),
        *_meter(config, cache),
        *backend_lines(cache.ops, cache.device, config.enforce_eager),
        f"memory  {', '.join(f'{tier} {use.total_bytes / GIB:.2f} GiB' for tier, use in cache.use().items())} "
        f"for up to {counted(config.max_num_seqs, 'sequence')} at once",
        f"cache   {describe_prefixes(config, cache.layout)}",
    ]
    for length in sorted({min(limit, 1024), min(limit, 8192), limit}):
        need = cache.demand(length, length)
        fitting: dict[str, int] = {}
        for kind in cache.layout.paged:
            if need[kind]:
                tier, count = kind.rpartition(" ")[2], total[kind] // need[kind]
                fitting[tier] = min(count, fitting.get(tier, count))
        counts = ", ".join(f"{count} on the {tier}" for tier, count in fitting.items())
        lines.append(f"fits    sequences of {counted(length, 'token')}: {counts}")
    return lines


def _recurrent(cache: KVCache) -> list[str]:
    """A line about recurrent states, for a server's start."""
    if (states := cache.recurrent) is None:
        return []
    layout = states.layout
    dtype, drafted = str(layout.settings.dtype).removeprefix("torch."), layout.settings.drafted
    held = {
        counted(cache.slots, "sequence"): RING * cache.slots,
        counted(states.reserved, "checkpoint"): states.reserved,
    }
    if drafted:
        held[counted(drafted, "drafted token")] = drafted
    memory = ", ".join(f"{in_gib(count * layout.state_bytes)} for {what}" for what, count in held.items())
    return [
        f"states  {len(layout.layers)} of {counted(cache.shape.num_layers, 'layer')} keep a recurrent state in "
        f"{dtype}: {memory}"
    ]


def _drafts(config: EngineConfig, loaded: LoadedModel, cache: KVCache) -> list[str]:
    """A line about speculative decoding, for a server's start; empty without it."""
    if (drafts := config.speculation) is None:
        return []
    count = counted(drafts.num_speculative_tokens or 0, "token")
    line = f"drafts  {drafts.method}, up to {count} of a sequence in a step"
    if weights := loaded.model.head_bytes:
        sizes = cache.dtype, cache.max_model_len, config.most_running, config.drafted_tokens
        beside = head_bytes(loaded.shard.config, *sizes)
        line += f", by a layer of the files: {in_gib(weights)} of weights, {in_gib(beside)} for its cache and states"
    return [line + (_of_compressed(cache) if cache.spec.drafts else "")]


def _meter(config: EngineConfig, cache: KVCache) -> list[str]:
    """A line about the quality meter, for a server's start; empty without it."""
    if not config.quality_meter:
        return []
    return [f"meter   measures {100 * config.quality_meter:g} % of the decode steps{_of_compressed(cache)}"]


def _of_compressed(cache: KVCache) -> str:
    """Says which sequences have compressed tokens, which alone are in the index that selects."""
    shortest = cache.spec.dense_limit
    none = f": none, as max_model_len is {cache.max_model_len}" if shortest >= cache.max_model_len else ""
    return f", of sequences with more than {counted(shortest, 'token')} (--kv-dense-below){none}"


def _experts(model: ModelConfig) -> str:
    """Describes the experts of a model; empty without experts."""
    if model.experts is None:
        return ""
    routing, layers = model.experts.routing, model.num_expert_layers
    return f"{routing.experts} experts in {layers} of them, {routing.per_token} a token, "


def backend_lines(ops: Ops, device: torch.device, eager: bool) -> list[str]:
    """Lines about backends, for a server's start.

    They list the called ops by backend. They name the ops that run in Triton or PyTorch because a compiled library is
    missing, with the command that builds it. They say why other ops run in PyTorch. On a GPU, or if a library is
    missing, slow ops are also logged as warnings.
    """
    of_backend: dict[str, list[str]] = {}
    for name in sorted(ops.called):
        of_backend.setdefault(ops.backends[name], []).append(name)
    lines = [f"kernels {backend}: {', '.join(names)}" for backend, names in sorted(of_backend.items())]
    gpu = device.type == "cuda"
    fallen = [name for name in sorted(ops.unbuilt) if ops.backends[name].startswith(("triton", "reference"))]
    slow = [_fallen(ops, fallen, gpu)] if fallen else []
    for name in of_backend.get("reference", []):
        if ops.reasons[name] and name not in fallen:
            slow.append(f"{name} runs in PyTorch, {with_names('; '.join(ops.reasons[name]))}")
    for line in slow:
        lines.append(f"slow    {line}")
        if gpu or fallen:
            logger.warning("on a %s %s", "GPU" if gpu else "CPU", line)
    if gpu and ops.synchronising and not eager:
        lines.append(f"graphs  none, as with enforce_eager: the host waits for {', '.join(ops.synchronising)}")
    return lines


def _fallen(ops: Ops, names: list[str], gpu: bool) -> str:
    slower, faster, remedy = (
        ("Triton or PyTorch", "CUDA", building_cuda()) if gpu else ("PyTorch", "C++", building_cpu())
    )
    run = "runs" if len(names) == 1 else "run"
    reasons = "; ".join(dict.fromkeys(ops.unbuilt[name] for name in names))
    return f"{', '.join(names)} {run} in {slower} instead of {faster}: {reasons}. To build: {remedy}"


def device_of(name: str) -> torch.device:
    """Returns the device named ``name``. A GPU's device always has an index. If the name has none, it is the index of
    the current device. Raises ValueError if this machine does not have the device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f"device={name!r} is not auto, cpu, cuda or cuda:N", ["device"]) from error
    if device.type not in DEFAULT_UTILIZATION:
        raise SettingsError(f"device={name!r} is not supported; use cpu or cuda", ["device"])
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        devices = counted(count, "CUDA device")
        raise SettingsError(f"device={name!r} is not there: this machine has {devices}", ["device"])
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def current(device: torch.device) -> torch.accelerator.device_index:
    """A context in which ``device`` is the thread's current device. Tensors know their device, but events, streams,
    graphs and Triton's launches use the current device."""
    return torch.accelerator.device_index(None if device.type == "cpu" else device.index)


def sampling_of_directory(name: str) -> dict[str, Any] | None:
    """Returns the sampling defaults of ``--generation-config``. Returns None for "auto", which stands for the model's
    own file, and {} for "vllm". Otherwise ``name`` is a directory.

    Raises ValueError if the directory has no generation_config.json, or one that cannot be used.
    """
    if name == "auto":
        return None
    if name == "vllm":
        return {}
    directory = Path(name).expanduser()
    if not (directory / GENERATION_CONFIG).is_file():
        reason = f"is neither 'auto', 'vllm' nor a directory with {GENERATION_CONFIG}"
        raise SettingsError(f"generation_config={name!r} {reason}", ["generation_config"])
    return read_sampling(directory)


def checked_defaults(defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``defaults`` updated with ``overrides``. Raises ValueError if a request could not have these
    parameters."""
    if unknown := [name for name in overrides if name not in OVERRIDES]:
        reason = f"has {', '.join(map(repr, unknown))}, and can have {', '.join(OVERRIDES)}"
        also = "; default_max_tokens limits answers" if "max_new_tokens" in unknown else ""
        names = ["override_generation_config", "default_max_tokens"]
        raise SettingsError(f"override_generation_config {reason}{also}", names)
    if wrong := wrong_json_types(SamplingParams, overrides):
        raise SettingsError(f"override_generation_config: {'; '.join(wrong)}", ["override_generation_config"])
    try:
        SamplingParams(**defaults)
    except (TypeError, ValueError) as error:
        remedy = "correct it, or leave it out with generation_config='vllm'"
        raise SettingsError(f"{GENERATION_CONFIG}: {error}; {remedy}", ["generation_config"]) from error
    try:
        SamplingParams(**{**defaults, **overrides})
    except ValueError as error:
        raise SettingsError(f"override_generation_config: {error}", ["override_generation_config"]) from error
    return {**defaults, **overrides}


def describe_defaults(defaults: Mapping[str, Any], overridden: bool) -> list[str]:
    """Lines about sampling defaults, for a server's start. ``overridden`` says whether ``override_generation_config``
    is set."""
    source = f"{GENERATION_CONFIG}, overridden" if overridden else GENERATION_CONFIG
    values = ", ".join(f"{name} {value if name == 'seed' else f'{value:g}'}" for name, value in defaults.items())
    return [f"sample  {values} for requests that set none ({source})"] if defaults else []
