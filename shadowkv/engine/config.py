"""Everything an engine is built from, and its command-line flags, with the names that are common elsewhere."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shadowkv.field_types import wrong_types
from shadowkv.kvcache.policy.spec import FETCH_BUFFER, PAGE, PREFILL_ERROR, PREFILLS, KVSpec
from shadowkv.kvcache.presets import CACHE_DTYPES, POLICY_HELP, preset
from shadowkv.load_settings import (
    ATTENTION_BACKENDS,
    ATTENTION_HELP,
    DTYPES,
    LOAD_FORMATS,
    OVERRIDES_HELP,
    QUANTIZATIONS,
    parse_attention_backend,
    parse_count,
    parse_object,
    parse_overrides,
)
from shadowkv.prefix_cache.device.eviction import POLICIES
from shadowkv.wording import SettingsError

DEFAULT_MODEL = "smollm2-135m-instruct"
PREFILL = ("auto", *PREFILLS)
DISK_GIB = 64.0
ROLES = ("both", "prefill", "decode")
SCHEDULING_POLICIES = ("fair", "fcfs", "priority")
SPARE_SEQS = 1
"""Sequences that may run beyond ``max_num_seqs``, in the place of a cached one: the only one of a tenant for whom
nothing else is computed."""
QUANTIZATION_HELP = (
    "fp8: weights of projections in 8 bits, for GPUs from Ada and Hopper on; none: weights in --dtype, whatever files "
    "have; others: of random weights (--load-format dummy), and of shapes in plans (default: the files' own)"
)


@dataclass(frozen=True)
class EngineConfig:
    """An engine's settings; every field is a flag of the same name with dashes.

    Raises:
        SettingsError: values of other types, or that are not valid; the message lists every one.
    """

    model: str = DEFAULT_MODEL
    revision: str | None = None
    download_dir: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    adapter: str | None = None
    load_format: str = "auto"
    max_num_seqs: int = 48
    max_model_len: int | None = None
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    max_cached_seqs: int = 8
    kv_offload_gib: float = 0.0
    kv_disk_dir: str | None = None
    kv_disk_gib: float | None = None
    eviction: str = "lru"
    role: str = "both"
    max_queued_seqs: int = 1024
    scheduling_policy: str = "fair"
    default_max_tokens: int = 1024
    max_logprobs: int = 20
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    seed: int | None = None
    kv: str | KVSpec = "turbo"
    kv_rank: int | None = None
    kv_budget: float | int | None = None
    kv_chunk: int | None = None
    kv_outliers: int | None = None
    kv_dense_below: int | str = "auto"
    prefill: str = "auto"
    prefill_error: float | None = None
    gpu_memory_utilization: float | None = None
    host_memory_gib: float | None = None
    fetch_buffer: float | None = None
    dtype: str = "auto"
    quantization: str | None = None
    attention_backend: str = "auto"
    device: str = "auto"
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    disable_custom_all_reduce: bool = False
    rope_theta: float | None = None
    hf_overrides: Mapping[str, Any] | None = None
    enforce_eager: bool = False
    skip_warmup: bool = False

    def __post_init__(self) -> None:
        if wrong := wrong_types(self):
            raise SettingsError("; ".join(wrong), self.names())
        bad = [
            f"{name}={getattr(self, name)} must be at least {least}"
            for name, least in (
                ("max_num_seqs", 1),
                ("max_num_batched_tokens", 1),
                ("max_cached_seqs", 0),
                ("max_queued_seqs", 1),
                ("default_max_tokens", 1),
                ("max_logprobs", -1),
                ("max_model_len", 1),
                ("tensor_parallel_size", 1),
            )
            if getattr(self, name) is not None and getattr(self, name) < least
        ]
        bad += [
            f"{name}={getattr(self, name)!r} is not one of {', '.join(known)}"
            for name, known in (
                ("dtype", DTYPES),
                ("load_format", LOAD_FORMATS),
                ("attention_backend", ATTENTION_BACKENDS),
                ("prefill", PREFILL),
                ("eviction", tuple(POLICIES)),
                ("role", ROLES),
                ("scheduling_policy", SCHEDULING_POLICIES),
            )
            if getattr(self, name) not in known
        ]
        if self.quantization not in (None, *QUANTIZATIONS):
            bad.append(f"quantization={self.quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
        if self.kv_dense_below != "auto" and not (isinstance(self.kv_dense_below, int) and self.kv_dense_below >= 0):
            bad.append(f"kv_dense_below={self.kv_dense_below!r} must be 'auto' or a number of tokens of at least 0")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            bad.append(f"gpu_memory_utilization={self.gpu_memory_utilization} must be in (0, 1]")
        if self.host_memory_gib is not None and not self.host_memory_gib >= 0:
            bad.append(f"host_memory_gib={self.host_memory_gib} must not be negative")
        if not 0 <= self.kv_offload_gib < math.inf:
            bad.append(f"kv_offload_gib={self.kv_offload_gib} must be a finite number of at least 0")
        if not 0 < self.disk_gib < math.inf:
            bad.append(f"kv_disk_gib={self.kv_disk_gib} must be a finite number above 0")
        if self.kv_disk_gib is not None and self.kv_disk_dir is None:
            bad.append(f"kv_disk_gib={self.kv_disk_gib} has no meaning without kv_disk_dir, the directory of the files")
        if self.role in ROLES[1:] and self.kv_disk_dir is None:
            bad.append(f"role={self.role!r} needs kv_disk_dir, the directory that prefill and decode servers share")
        if self.generation_config == "":
            bad.append("generation_config must be 'auto', 'vllm' or a directory, and not empty")
        if self.kv_disk_dir == "":
            bad.append("kv_disk_dir must not be empty")
        if (self.kv_offload_gib or self.kv_disk_dir) and not self.enable_prefix_caching:
            bad.append("kv_offload_gib and kv_disk_dir have no meaning with enable_prefix_caching=False")
        if not (self.fetch_buffer is None or self.fetch_buffer == 0 or 1 <= self.fetch_buffer < math.inf):
            bad.append(f"fetch_buffer={self.fetch_buffer} must be 0 or a finite number of at least 1")
        if self.tensor_parallel_size > 1 and self.device.startswith("cuda:"):
            bad.append(f"device={self.device!r} is one GPU: tensor_parallel_size > 1 takes them from the first on")
        if self.rope_theta is not None and not self.rope_theta > 0:
            bad.append(f"rope_theta={self.rope_theta} must be positive")
        if self.rope_theta is not None and "rope_theta" in (self.hf_overrides or {}):
            bad.append(f"rope_theta={self.rope_theta} is an entry of hf_overrides, too: pass one of them")
        if bad:
            raise SettingsError("; ".join(bad), self.names())

    def spec(self) -> KVSpec:
        """The policy, not yet resolved for a model; raises ValueError for an unknown preset."""
        dense_below = None if isinstance(self.kv_dense_below, str) else self.kv_dense_below
        return preset(
            self.kv,
            rank=self.kv_rank,
            budget=self.kv_budget,
            chunk=self.kv_chunk,
            outliers=self.kv_outliers,
            dense_below=dense_below,
            prefill=None if self.prefill == "auto" else self.prefill,
            prefill_error=self.prefill_error,
        )

    def refused_policy(self, error: ValueError) -> SettingsError:
        """The error for what ``spec`` returned being refused, with the reasons in ``error``, in terms of settings."""
        names = ("kv_rank", "kv_budget", "kv_chunk", "kv_outliers", "prefill_error")
        chosen = {name: getattr(self, name) for name in names}
        return refused_policy(error, self.kv if isinstance(self.kv, str) else None, **chosen)

    @classmethod
    def names(cls) -> list[str]:
        """Names of all fields."""
        return [field.name for field in fields(cls)]

    @property
    def overrides(self) -> dict[str, Any]:
        """Entries that replace those of the model's config.json."""
        theta = {} if self.rope_theta is None else {"rope_theta": self.rope_theta}
        return {**(self.hf_overrides or {}), **theta}

    @property
    def disk_gib(self) -> float:
        """Limit on the files of the prefix cache, in GiB."""
        return DISK_GIB if self.kv_disk_gib is None else self.kv_disk_gib

    @property
    def policy(self) -> str:
        """The policy's name; one that was given as a KVSpec has none."""
        return self.kv if isinstance(self.kv, str) else "custom"

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> EngineConfig:
        """The config given by parsed flags."""
        return cls(**{name: getattr(args, name) for name in cls.names()})

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Adds every flag, in groups."""

        def add(target: Any, *flags: str, **options: Any) -> None:
            name = flags[0].removeprefix("--").replace("-", "_")
            target.add_argument(*flags, dest=name, default=getattr(EngineConfig, name), **options)

        model = parser.add_argument_group("model")
        add(model, "--model", help="name, Hugging Face directory or hub id, or .gguf file (default: %(default)s)")
        add(model, "--revision", metavar="NAME", help="of the model's repository in the hub: branch, tag or commit")
        add(model, "--download-dir", metavar="DIR", help="where the hub's files are kept (default: its own cache)")
        text = "another one than the model's: a Hugging Face directory or hub id, or a .gguf file"
        add(model, "--tokenizer", metavar="NAME", help=text)
        text = "another one than the model's: a file, or the template itself, in Jinja"
        add(model, "--chat-template", metavar="FILE", help=text)
        add(model, "--adapter", metavar="DIR", help="PEFT LoRA directory, merged at load")
        add(model, "--load-format", choices=LOAD_FORMATS, help="dummy: random weights (default: %(default)s)")
        add(
            model,
            "--dtype",
            choices=DTYPES,
            help="auto: bfloat16 on a GPU, else float32",
        )
        add(model, "--quantization", "-q", choices=QUANTIZATIONS, help=QUANTIZATION_HELP)
        text, names = ATTENTION_HELP, "|".join(ATTENTION_BACKENDS)
        add(model, "--attention-backend", type=parse_attention_backend, metavar=names, help=text)
        add(model, "--device", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
        add(
            model,
            "--tensor-parallel-size",
            "-tp",
            type=int,
            metavar="N",
            help="GPUs of this machine that the model is cut up for, a process each (default: %(default)s)",
        )
        text = "of a mixture of experts each of those GPUs has some whole, instead of a part of every one"
        add(model, "--enable-expert-parallel", "-ep", action="store_true", help=text)
        text = "sum over GPUs through NCCL alone, not through the memory of each other"
        add(model, "--disable-custom-all-reduce", action="store_true", help=text)
        add(model, "--rope-theta", type=float, help="overrides the model's own")
        add(model, "--hf-overrides", type=parse_overrides, metavar="JSON", help=OVERRIDES_HELP)
        add(model, "--enforce-eager", action="store_true", help="no CUDA graphs")
        add(model, "--skip-warmup", action="store_true", help="compile and plan when requests first need it, on a GPU")
        batch = parser.add_argument_group("batch")
        add(
            batch,
            "--max-num-seqs",
            "--batch",
            type=parse_count,
            metavar="N",
            help="sequences that run at once (default: %(default)s)",
        )
        add(
            batch,
            "--max-model-len",
            type=parse_length,
            metavar="auto|TOKENS",
            help="longest prompt + output (default, and auto: the model's own, halved until one sequence fits)",
        )
        add(
            batch,
            "--max-num-batched-tokens",
            type=parse_count,
            metavar="TOKENS",
            help="tokens of one pass, of prompts and of sequences that decode; a prompt of more is computed by itself "
            "(default: %(default)s)",
        )
        add(
            batch,
            "--enable-prefix-caching",
            action=argparse.BooleanOptionalAction,
            help="requests share what was computed of starts of their prompts (default: %(default)s)",
        )
        add(
            batch,
            "--max-cached-seqs",
            type=int,
            metavar="N",
            help="finished sequences kept for the prefix cache beside the running ones (default: %(default)s)",
        )
        add(
            batch,
            "--max-queued-seqs",
            type=int,
            metavar="N",
            help="requests of one API key, or address, that may wait, and half of all; more are refused "
            "(default: %(default)s)",
        )
        text = "who is next: fair: API keys, or addresses, take turns by tokens; fcfs: first come, first served; "
        text += "priority: by requests' priority, lower numbers first (default: %(default)s)"
        add(batch, "--scheduling-policy", choices=SCHEDULING_POLICIES, help=text)
        add(
            batch,
            "--default-max-tokens",
            type=parse_count,
            metavar="TOKENS",
            help="output reserved for a chat that names none; completions have 16 then (default: %(default)s)",
        )
        text = "alternatives of a token that a request may ask for, -1: all of the vocabulary (default: %(default)s)"
        add(batch, "--max-logprobs", type=int, metavar="N", help=text)
        add(
            batch,
            "--generation-config",
            metavar="auto|vllm|DIR",
            help="sampling of requests that do not say theirs: the model's own generation_config.json, vllm: none, or "
            "that of a directory (default: %(default)s)",
        )
        text = "entries that replace its: temperature, top_p, top_k, min_p, repetition_penalty"
        add(batch, "--override-generation-config", type=parse_object, metavar="JSON", help=text)
        text = "of the random numbers of requests without a seed (default: others at every start)"
        add(batch, "--seed", type=int, metavar="N", help=text)
        kv = parser.add_argument_group("KV cache")
        one = kv.add_mutually_exclusive_group()
        add(
            one,
            "--kv",
            type=policy_name,
            metavar="POLICY",
            help=f"{POLICY_HELP}; short prompts stay dense by themselves (default: %(default)s)",
        )
        one.add_argument(
            "--kv-cache-dtype",
            dest="kv",
            type=policy_of_cache_dtype,
            default=argparse.SUPPRESS,
            metavar="DTYPE",
            help=f"the policy by vLLM's name: auto (the default one), {', '.join(CACHE_DTYPES)}",
        )
        add(kv, "--kv-rank", type=int, help="dimensions of low-rank keys")
        add(kv, "--kv-budget", type=parse_budget, help="selected tokens a step: a fraction (0.0156) or a count (2048)")
        add(kv, "--kv-chunk", type=int, help=f"tokens selected together; divides {PAGE}")
        add(kv, "--kv-outliers", type=int, help="exact chunks per kv head")
        add(
            kv,
            "--kv-dense-below",
            type=parse_dense_below,
            metavar="auto|TOKENS",
            help="shorter sequences stay dense; auto: where compressing costs more than it saves, by model, policy and "
            "batch; 0: as few as can be (default: %(default)s)",
        )
        what = "sparse: long prompts attend to sampled blocks of keys, --prefill-error to within; auto: sparse on a GPU"
        add(kv, "--prefill", choices=PREFILL, help=f"{what} (default: %(default)s)")
        add(
            kv,
            "--prefill-error",
            type=float,
            metavar="ERROR",
            help=f"standard deviation of a query's attention in a sparse prefill (default: {PREFILL_ERROR})",
        )
        add(
            kv,
            "--gpu-memory-utilization",
            type=float,
            metavar="SHARE",
            help="of the device's memory, weights included (default: 0.9; of free memory on a CPU: 0.4)",
        )
        add(
            kv,
            "--host-memory-gib",
            type=float,
            metavar="GIB",
            help="pinned host memory for values (default: what the batch needs, at most half of what is free)",
        )
        add(
            kv,
            "--kv-offload-gib",
            type=float,
            metavar="GIB",
            help="pinned host memory for copies of what the prefix cache has computed (default: none; with "
            "--kv-disk-dir room for two of the longest sequences, 1 to 16 GiB)",
        )
        add(
            kv,
            "--kv-disk-dir",
            metavar="DIR",
            help="where such copies are kept as files, which outlive the server and may be shared by several "
            "(default: none)",
        )
        add(kv, "--kv-disk-gib", type=float, metavar="GIB", help=f"of those files, at the most (default: {DISK_GIB})")
        add(
            kv,
            "--eviction",
            choices=tuple(POLICIES),
            help="copies in host memory that make room for others: lru: the least recently used; graph: those that the "
            "fewest requests and other copies build on (default: %(default)s)",
        )
        add(
            kv,
            "--role",
            choices=ROLES,
            help="prefill: answers come when what was computed of their prompts is in --kv-disk-dir; decode: prompts "
            "are awaited there that a request names; both: as a request asks (default: %(default)s)",
        )
        add(
            kv,
            "--fetch-buffer",
            type=float,
            metavar="FACTOR",
            help="device memory for values fetched from the host, in chunks that a step selects of the longest context "
            f"(default: {FETCH_BUFFER}, on a CPU none; 0: every step fetches all it selects)",
        )


def refused_policy(error: ValueError, kv: str | None, **chosen: Any) -> SettingsError:
    """The error for a refused policy, in terms of the settings that name it.

    Args:
        error: the reason; what parts report refers to the policy's own fields.
        kv: the policy's name, if it has one.
        chosen: fields that were changed by separate settings (``kv_rank``); None where they were not.
    """
    given = {name: value for name, value in {"kv": kv, **chosen}.items() if value is not None}
    named = error.settings if isinstance(error, SettingsError) else ()
    prefix = f"{', '.join(f'{name}={value!r}' for name, value in given.items())}: " if given else ""
    return SettingsError(f"{prefix}{error}", (*given, *named))


def policy_name(text: str) -> str:
    """A policy as given on a command line, unchanged; raises ArgumentTypeError where ``preset`` cannot read it."""
    try:
        preset(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def policy_of_cache_dtype(name: str) -> str:
    """The policy for vLLM's name of a cache dtype; raises ArgumentTypeError where there is none."""
    policies = {"auto": str(EngineConfig.kv), **CACHE_DTYPES}
    if name not in policies:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(policies)}; --kv takes every policy")
    return policies[name]


def parse_length(text: str) -> int | None:
    """``--max-model-len`` as given on a command line; None where it is to be chosen, as in vLLM ``auto`` or -1."""
    return None if text in ("auto", "-1") else parse_count(text)


def parse_dense_below(text: str) -> int | str:
    """``--kv-dense-below`` as given on a command line; what is not a number is for the config to refuse."""
    return int(text) if text.isdecimal() else text


def parse_budget(text: str) -> float | int:
    """A budget as given on a command line: with a point it is a fraction, without one a number of tokens. Raises
    ArgumentTypeError for what cannot be either, for any model."""
    try:
        value = int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a fraction nor a number of tokens") from error
    if not 0 < value < math.inf or (isinstance(value, float) and value > 1):
        raise argparse.ArgumentTypeError(f"{text!r} must be a fraction in (0, 1] or at least 1 token")
    return value
