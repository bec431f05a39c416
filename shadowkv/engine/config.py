"""Everything an engine is built from, and its command-line flags, with the names that are common elsewhere."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shadowkv.field_types import wrong_types
from shadowkv.kvcache.policy.spec import FETCH_BUFFER, PREFILL_ERROR, PREFILLS, KVSpec
from shadowkv.kvcache.presets import CACHE_DTYPES, POLICY_HELP, preset
from shadowkv.load_settings import (
    ATTENTION_BACKENDS,
    DTYPES,
    LOAD_FORMATS,
    QUANTIZATIONS,
    parse_attention_backend,
    parse_count,
    parse_object,
    parse_overrides,
)
from shadowkv.prefix_cache.device.eviction import POLICIES
from shadowkv.settings import (
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Check,
    OtherFlag,
    add_flags,
    at_least,
    finite,
    setting,
    violations,
)
from shadowkv.wording import SettingsError

DEFAULT_MODEL = "smollm2-135m-instruct"
PREFILL = ("auto", *PREFILLS)
DISK_GIB = 64.0
DEFAULT_POLICY = "turbo"
ROLES = ("both", "prefill", "decode")
SCHEDULING_POLICIES = ("fair", "fcfs", "priority")
SPARE_SEQS = 1
"""Sequences that may run beyond ``max_num_seqs``, in the place of a cached one: the only one of a tenant for whom
nothing else is computed."""
MODEL, BATCH, CACHE = "model", "batch", "KV cache"
"""Groups of flags."""


def policy_name(text: str) -> str:
    """A policy as given on a command line, unchanged; raises ArgumentTypeError where ``preset`` cannot read it."""
    try:
        preset(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def policy_of_cache_dtype(name: str) -> str:
    """The policy for vLLM's name of a cache dtype; raises ArgumentTypeError where there is none."""
    policies = {"auto": DEFAULT_POLICY, **CACHE_DTYPES}
    if name not in policies:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(policies)}; --kv takes every policy")
    return policies[name]


def parse_length(text: str) -> int | None:
    """``--max-model-len`` as given on a command line; None where it is to be chosen, as in vLLM ``auto`` or -1."""
    return None if text in ("auto", "-1") else parse_count(text)


def parse_dense_below(text: str) -> int | str:
    """``--kv-dense-below`` as given on a command line; what is not a number is for the config to refuse."""
    return int(text) if text.isdecimal() else text


class _OfPolicy(argparse.Action):
    """A flag that there is not: what it would set is a field of the policy."""

    def __call__(self, parser: Any, namespace: Any, values: Any, flag: str | None = None) -> None:
        field = str(flag).removeprefix("--kv-")
        raise argparse.ArgumentError(None, f"{flag} is a field of the policy: --kv {DEFAULT_POLICY}:{field}={values}")


@dataclass(frozen=True)
class EngineConfig:
    """An engine's settings; every field is a flag of the same name with dashes.

    Raises:
        SettingsError: values of other types, or that are not valid; the message lists every one.
    """

    model: str = setting(
        DEFAULT_MODEL, MODEL, "name, Hugging Face directory or hub id, or .gguf file (default: %(default)s)"
    )
    revision: str | None = setting(
        None, MODEL, "of the model's repository in the hub: branch, tag or commit", metavar="NAME"
    )
    download_dir: str | None = setting(
        None, MODEL, "where the hub's files are kept (default: its own cache)", metavar="DIR"
    )
    tokenizer: str | None = setting(
        None,
        MODEL,
        "another one than the model's: a Hugging Face directory or hub id, or a .gguf file",
        metavar="NAME",
    )
    chat_template: str | None = setting(
        None, MODEL, "another one than the model's: a file, or the template itself, in Jinja", metavar="FILE"
    )
    adapter: str | None = setting(None, MODEL, "PEFT LoRA directory, merged at load", metavar="DIR")
    load_format: str = setting("auto", MODEL, "dummy: random weights (default: %(default)s)", choices=LOAD_FORMATS)
    dtype: str = setting("auto", MODEL, "auto: bfloat16 on a GPU, else float32", choices=DTYPES)
    quantization: str | None = setting(
        None,
        MODEL,
        "fp8: weights of projections in 8 bits, for GPUs from Ada and Hopper on; none: weights in --dtype, whatever "
        "files have; others: of random weights (--load-format dummy), and of shapes in plans (default: the files' own)",
        "-q",
        choices=QUANTIZATIONS,
    )
    attention_backend: str = setting(
        "auto",
        MODEL,
        "shadowkv: this package's kernels, Triton's and PyTorch's; flashinfer, flash-attn: that package's wherever it "
        "serves, and the others elsewhere; auto: those that were measured to be faster, flashinfer's for heads of 256 "
        "and else shadowkv's (default: %(default)s)",
        choices=ATTENTION_BACKENDS,
        parse=parse_attention_backend,
        metavar="|".join(ATTENTION_BACKENDS),
    )
    device: str = setting("auto", MODEL, "auto, cpu, cuda or cuda:N (default: %(default)s)")
    tensor_parallel_size: int = setting(
        1,
        MODEL,
        "GPUs of this machine that the model is cut up for, a process each (default: %(default)s)",
        "-tp",
        metavar="N",
        check=at_least(1),
    )
    enable_expert_parallel: bool = setting(
        False,
        MODEL,
        "of a mixture of experts each GPU has some whole, instead of a part of every one",
        "-ep",
    )
    disable_custom_all_reduce: bool = setting(
        False, MODEL, "sum over GPUs through NCCL alone, not through the memory of each other"
    )
    rope_theta: float | None = setting(None, MODEL, "overrides the model's own", check=POSITIVE)
    hf_overrides: Mapping[str, Any] | None = setting(
        None,
        MODEL,
        "entries that replace those of the model's config.json, as in vLLM; of GGUF files by the same names",
        parse=parse_overrides,
        metavar="JSON",
    )
    enforce_eager: bool = setting(False, MODEL, "no CUDA graphs")
    skip_warmup: bool = setting(False, MODEL, "compile and plan when requests first need it, on a GPU")
    max_num_seqs: int = setting(
        48,
        BATCH,
        "sequences that run at once (default: %(default)s)",
        "--batch",
        parse=parse_count,
        metavar="N",
        check=at_least(1),
    )
    max_model_len: int | None = setting(
        None,
        BATCH,
        "longest prompt + output (default, and auto: the model's own, halved until one sequence fits)",
        parse=parse_length,
        metavar="auto|TOKENS",
        check=at_least(1),
    )
    max_num_batched_tokens: int = setting(
        8192,
        BATCH,
        "tokens of one pass, of prompts and of sequences that decode; a prompt of more is computed by itself "
        "(default: %(default)s)",
        parse=parse_count,
        metavar="TOKENS",
        check=at_least(1),
    )
    enable_prefix_caching: bool = setting(
        True, BATCH, "requests share what was computed of starts of their prompts (default: %(default)s)"
    )
    max_cached_seqs: int = setting(
        8,
        BATCH,
        "finished sequences kept for the prefix cache beside the running ones (default: %(default)s)",
        metavar="N",
        check=at_least(0),
    )
    max_queued_seqs: int = setting(
        1024,
        BATCH,
        "requests of one API key, or address, that may wait, and half of all; more are refused (default: %(default)s)",
        metavar="N",
        check=at_least(1),
    )
    scheduling_policy: str = setting(
        "fair",
        BATCH,
        "who is next: fair: API keys, or addresses, take turns by tokens; fcfs: first come, first served; "
        "priority: by requests' priority, lower numbers first (default: %(default)s)",
        choices=SCHEDULING_POLICIES,
    )
    default_max_tokens: int = setting(
        1024,
        BATCH,
        "output reserved for a chat that names none; completions have 16 then (default: %(default)s)",
        parse=parse_count,
        metavar="TOKENS",
        check=at_least(1),
    )
    max_logprobs: int = setting(
        20,
        BATCH,
        "alternatives of a token that a request may ask for, -1: all of the vocabulary (default: %(default)s)",
        metavar="N",
        check=at_least(-1),
    )
    generation_config: str = setting(
        "auto",
        BATCH,
        "sampling of requests that do not say theirs: the model's own generation_config.json, vllm: none, or "
        "that of a directory (default: %(default)s)",
        metavar="auto|vllm|DIR",
        check=Check(lambda value: value != "", "must be 'auto', 'vllm' or a directory, and not empty"),
    )
    override_generation_config: Mapping[str, Any] | None = setting(
        None,
        BATCH,
        "entries that replace its: temperature, top_p, top_k, min_p, repetition_penalty",
        parse=parse_object,
        metavar="JSON",
    )
    seed: int | None = setting(None, BATCH, "default sampling seed (default: random for each start)", metavar="N")
    kv: str | KVSpec = setting(
        DEFAULT_POLICY,
        CACHE,
        f"{POLICY_HELP}; short prompts stay dense by themselves (default: %(default)s)",
        parse=policy_name,
        metavar="POLICY",
        other=OtherFlag(
            "--kv-cache-dtype",
            policy_of_cache_dtype,
            "DTYPE",
            f"the policy by vLLM's name: auto (the default one), {', '.join(CACHE_DTYPES)}",
        ),
    )
    kv_dense_below: int | str = setting(
        "auto",
        CACHE,
        "shorter sequences stay dense; auto: where compressing costs more than it saves, by model, policy and "
        "batch; 0: as few as can be (default: %(default)s)",
        parse=parse_dense_below,
        metavar="auto|TOKENS",
        check=Check(
            lambda value: value == "auto" or (isinstance(value, int) and value >= 0),
            "must be 'auto' or a number of tokens of at least 0",
        ),
    )
    prefill: str = setting(
        "auto",
        CACHE,
        "sparse: long prompts attend to sampled blocks of keys, --prefill-error to within; auto: sparse on a GPU "
        "(default: %(default)s)",
        choices=PREFILL,
    )
    prefill_error: float | None = setting(
        None,
        CACHE,
        f"standard deviation of a query's attention in a sparse prefill (default: {PREFILL_ERROR})",
        metavar="ERROR",
    )
    gpu_memory_utilization: float | None = setting(
        None,
        CACHE,
        "of the device's memory, weights included (default: 0.9; of free memory on a CPU: 0.4)",
        metavar="SHARE",
        check=SHARE,
    )
    host_memory_gib: float | None = setting(
        None,
        CACHE,
        "pinned host memory for values (default: what the batch needs, at most half of what is free)",
        metavar="GIB",
        check=NOT_NEGATIVE,
    )
    kv_offload_gib: float = setting(
        0.0,
        CACHE,
        "pinned host memory for copies of what the prefix cache has computed (default: none; with "
        "--kv-disk-dir room for two of the longest sequences, 1 to 16 GiB)",
        metavar="GIB",
        check=finite(0),
    )
    kv_disk_dir: str | None = setting(
        None,
        CACHE,
        "where such copies are kept as files, which outlive the server and may be shared by several (default: none)",
        metavar="DIR",
        check=NOT_EMPTY,
    )
    kv_disk_gib: float | None = setting(
        None,
        CACHE,
        f"of those files, at the most (default: {DISK_GIB})",
        metavar="GIB",
        check=finite(0, above=True),
    )
    eviction: str = setting(
        "lru",
        CACHE,
        "copies in host memory that make room for others: lru: the least recently used; graph: those that the "
        "fewest requests and other copies build on (default: %(default)s)",
        choices=tuple(POLICIES),
    )
    role: str = setting(
        "both",
        CACHE,
        "prefill: answers come when what was computed of their prompts is in --kv-disk-dir; decode: prompts "
        "are awaited there that a request names; both: as a request asks (default: %(default)s)",
        choices=ROLES,
    )
    fetch_buffer: float | None = setting(
        None,
        CACHE,
        "device memory for values fetched from the host, in chunks that a step selects of the longest context "
        f"(default: {FETCH_BUFFER}, on a CPU none; 0: every step fetches all it selects)",
        metavar="FACTOR",
        check=Check(lambda value: value == 0 or 1 <= value < math.inf, "must be 0 or a finite number of at least 1"),
    )

    def __post_init__(self) -> None:
        if wrong := wrong_types(self):
            raise SettingsError("; ".join(wrong), self.names())
        bad = violations(self)
        if self.kv_disk_gib is not None and self.kv_disk_dir is None:
            bad.append(f"kv_disk_gib={self.kv_disk_gib} has no meaning without kv_disk_dir, the directory of the files")
        if self.role in ROLES[1:] and self.kv_disk_dir is None:
            bad.append(f"role={self.role!r} needs kv_disk_dir, the directory that prefill and decode servers share")
        if (self.kv_offload_gib or self.kv_disk_dir) and not self.enable_prefix_caching:
            bad.append("kv_offload_gib and kv_disk_dir have no meaning with enable_prefix_caching=False")
        if self.tensor_parallel_size > 1 and self.device.startswith("cuda:"):
            bad.append(f"device={self.device!r} is one GPU: tensor_parallel_size > 1 takes them from the first on")
        if self.rope_theta is not None and "rope_theta" in (self.hf_overrides or {}):
            bad.append(f"rope_theta={self.rope_theta} is an entry of hf_overrides, too: pass one of them")
        if bad:
            raise SettingsError("; ".join(bad), self.names())

    def spec(self) -> KVSpec:
        """The policy, not yet resolved for a model; raises ValueError for an unknown preset."""
        dense_below = None if isinstance(self.kv_dense_below, str) else self.kv_dense_below
        return preset(
            self.kv,
            dense_below=dense_below,
            prefill=None if self.prefill == "auto" else self.prefill,
            prefill_error=self.prefill_error,
        )

    def refused_policy(self, error: ValueError) -> SettingsError:
        """The error for what ``spec`` returned being refused, with the reasons in ``error``, in terms of settings."""
        return refused_policy(error, self.kv if isinstance(self.kv, str) else None, prefill_error=self.prefill_error)

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

        add_flags(parser, EngineConfig)
        fields_of_policies = [f"--kv-{name}" for name in ("rank", "budget", "chunk", "outliers")]
        parser.add_argument(*fields_of_policies, action=_OfPolicy, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def refused_policy(error: ValueError, kv: str | None, **chosen: Any) -> SettingsError:
    """The error for a refused policy, in terms of the settings that name it.

    Args:
        error: the reason; what parts report refers to the policy's own fields.
        kv: the policy's name, if it has one.
        chosen: fields that were changed by separate settings (``prefill_error``); None where they were not.
    """
    given = {name: value for name, value in {"kv": kv, **chosen}.items() if value is not None}
    named = error.settings if isinstance(error, SettingsError) else ()
    prefix = f"{', '.join(f'{name}={value!r}' for name, value in given.items())}: " if given else ""
    return SettingsError(f"{prefix}{error}", (*given, *named))
