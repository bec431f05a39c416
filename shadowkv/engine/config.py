"""``EngineConfig``: the settings of an engine, which are also its command-line flags. Settings that vLLM also has have
vLLM's names."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from shadowkv.engine.speculation.config import SpeculativeConfig
from shadowkv.field_types import as_json, wrong_types
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import FETCH_BUFFER, PREFILL_ERROR, PREFILL_ERROR_HELP, KVSpec
from shadowkv.kvcache.presets import CACHE_DTYPES, POLICY_HELP, preset, with_drafts
from shadowkv.load_settings import (
    ATTENTION_BACKENDS,
    DTYPES,
    LOAD_FORMATS,
    QUANTIZATIONS,
    STATE_DTYPES,
    parse_attention_backend,
    parse_count,
    parse_object,
    parse_overrides,
    parse_speculative_config,
)
from shadowkv.prefix_cache.eviction import POLICIES
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
    values_of,
    violations,
)
from shadowkv.wording import SettingsError

if TYPE_CHECKING:
    from shadowkv.kvcache.sequences.layout import Layout

DEFAULT_MODEL = "smollm2-135m-instruct"
PREFILL = ("auto", "dense", "sparse")
DISK_GIB = 64.0
DEFAULT_POLICY = "turbo"
ROLES = ("both", "prefill", "decode")
SCHEDULING_POLICIES = ("fair", "fcfs", "priority")
SPARE_SEQS = 1
"""Number of sequences that can run in addition to ``max_num_seqs``. Each uses the slot of a cached sequence. They are
reserved for newcomers: tenants with a waiting request but none that runs or is prefilled."""
MODEL, SCHEDULING, SAMPLING, CACHE, PREFIX_CACHE = "model", "scheduling", "sampling", "KV cache", "prefix cache"
"""Groups of flags."""


def policy_name(text: str) -> str:
    """Checks a policy of the command line and returns it unchanged. For ``help`` it does what ``or_help`` does. Raises
    ArgumentTypeError if ``preset`` refuses the policy."""
    try:
        preset(or_help(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def or_help(text: str) -> str:
    """Returns the text of ``--kv`` unchanged. For ``help`` it prints what a policy can be, and ends the process."""
    if text == "help":
        from shadowkv.kvcache.listing import policies_text  # imports PyTorch, which other command lines do not need

        print(policies_text())
        raise SystemExit(0)
    return text


def add_policies(group: Any, *default: str, **changed: Any) -> None:
    """Adds the flag ``--kv`` of a command that compares policies. ``group`` is a parser or a parser's group of flags.
    ``default`` are the policies without the flag. ``changed`` replaces arguments of ``add_argument``."""
    text = f"cache policies to compare: {POLICY_HELP} (default: {' '.join(default)})"
    options = {"nargs": "+", "type": policy_name, "default": list(default), "metavar": "POLICY", "help": text}
    group.add_argument("--kv", **options | changed)


def is_prefill(name: str) -> bool:
    """Whether ``--prefill`` accepts a name: one of ``PREFILL``, or the name of a registered strategy."""
    if name in PREFILL:
        return True
    from shadowkv.kvcache.parts import is_known  # imports PyTorch, which the usual values do not need

    return is_known("prefill", name)


def policy_of_cache_dtype(name: str) -> str:
    """Returns the policy for a value of vLLM's ``--kv-cache-dtype``. Raises ArgumentTypeError for an unknown value."""
    policies = {"auto": DEFAULT_POLICY, **CACHE_DTYPES}
    if name not in policies:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(policies)}; --kv takes every policy")
    return policies[name]


def parse_length(text: str) -> int | None:
    """Parses ``--max-model-len``. None for ``auto`` and -1, as in vLLM: the engine chooses the length."""
    return None if text in ("auto", "-1") else parse_count(text)


def parse_dense_below(text: str) -> int | str:
    """Parses ``--kv-dense-below``. ``EngineConfig`` checks a value that is not a number."""
    return int(text) if text.isdecimal() else text


class _OfPolicy(argparse.Action):
    """The action of a removed flag, which is a field of the policy now. Its error says how to set the field with
    ``--kv``."""

    def __call__(self, parser: Any, namespace: Any, values: Any, flag: str | None = None) -> None:
        field = str(flag).removeprefix("--kv-")
        raise argparse.ArgumentError(None, f"{flag} is a field of the policy: --kv {DEFAULT_POLICY}:{field}={values}")


@dataclass(frozen=True)
class EngineConfig:
    """An engine's settings. Every field is a flag of the same name with dashes.

    Raises:
        SettingsError: some values have a wrong type or are invalid. The message lists all of them. If a type is wrong,
            the message lists only the values with wrong types.
    """

    model: str = setting(
        DEFAULT_MODEL, MODEL, "name of a model in the catalogue, Hugging Face hub id or directory, or .gguf file"
    )
    revision: str | None = setting(
        None, MODEL, "branch, tag or commit id of the model on the hub (default: the hub's default)", metavar="NAME"
    )
    download_dir: str | None = setting(
        None, MODEL, "directory that weights are downloaded to (default: the cache of Hugging Face)", metavar="DIR"
    )
    tokenizer: str | None = setting(
        None, MODEL, "tokenizer: hub id, directory or .gguf file (default: the model's)", metavar="NAME"
    )
    chat_template: str | None = setting(
        None, MODEL, "path of the chat template, or the template itself in Jinja (default: the model's)", metavar="FILE"
    )
    adapter: str | None = setting(
        None, MODEL, "directory of a PEFT LoRA adapter, which is merged into the weights at load", metavar="DIR"
    )
    load_format: str = setting(
        "auto", MODEL, "format of the weights: auto detects it, dummy uses random weights", choices=LOAD_FORMATS
    )
    dtype: str = setting(
        "auto", MODEL, "data type of weights and activations; auto: bfloat16 on a GPU, float32 on a CPU", choices=DTYPES
    )
    quantization: str | None = setting(
        None,
        MODEL,
        "quantization of the weights: fp8 converts them to 8 bits at load (GPUs of Ada, Hopper or later), none "
        "dequantizes them to --dtype, the other methods apply only to random weights (--load-format dummy) and to "
        "'shadowkv plan' (default: as in the files)",
        "-q",
        choices=QUANTIZATIONS,
    )
    attention_backend: str = setting(
        "auto",
        MODEL,
        "kernels of exact attention. shadowkv: this project's kernels only. flashinfer or flash-attn: the named "
        "package, where it can run. auto: FlashInfer for heads of 256 dimensions if it is installed, otherwise "
        "shadowkv",
        choices=ATTENTION_BACKENDS,
        parse=parse_attention_backend,
        metavar="|".join(ATTENTION_BACKENDS),
    )
    device: str = setting("auto", MODEL, "device to run on: auto, cpu, cuda or cuda:N")
    tensor_parallel_size: int = setting(
        1, MODEL, "number of GPUs of this machine to split the model across", "-tp", metavar="N", check=at_least(1)
    )
    enable_expert_parallel: bool = setting(
        False, MODEL, "use expert parallelism: each GPU holds some experts whole, not a part of every expert", "-ep"
    )
    disable_custom_all_reduce: bool = setting(False, MODEL, "disable the custom all-reduce kernel and use NCCL")
    rope_theta: float | None = setting(
        None, MODEL, "base of the rotary embedding (default: the model's)", metavar="BASE", check=POSITIVE
    )
    hf_overrides: Mapping[str, Any] | None = setting(
        None, MODEL, "entries that replace those of the model's config.json", parse=parse_overrides, metavar="JSON"
    )
    enforce_eager: bool = setting(False, MODEL, "disable CUDA graphs")
    skip_warmup: bool = setting(
        False, MODEL, "start without the warm-up on a GPU; the first requests wait for compilation instead"
    )
    max_num_seqs: int = setting(
        48,
        SCHEDULING,
        "maximum number of sequences that run at once",
        "--batch",
        parse=parse_count,
        metavar="N",
        check=at_least(1),
    )
    max_model_len: int | None = setting(
        None,
        SCHEDULING,
        "maximum length of a sequence, prompt and output together (default, and auto: the model's own, halved until "
        "one sequence fits into memory)",
        parse=parse_length,
        metavar="auto|TOKENS",
        check=at_least(1),
    )
    max_num_batched_tokens: int = setting(
        8192,
        SCHEDULING,
        "maximum number of tokens of one forward pass, prompts and decoding sequences together; a longer prompt is "
        "computed by itself, in pieces",
        parse=parse_count,
        metavar="TOKENS",
        check=at_least(1),
    )
    max_queued_seqs: int = setting(
        1024,
        SCHEDULING,
        "maximum number of waiting requests of one client (an API key, or else an address); all clients together may "
        "have twice as many; a client without a waiting request may queue one until there are four times as many; "
        "other requests are refused",
        metavar="N",
        check=at_least(1),
    )
    scheduling_policy: str = setting(
        "fair",
        SCHEDULING,
        "order of waiting requests: fair gives every client the same share of tokens, fcfs is first come, first "
        "served, priority runs the lowest priority number first",
        choices=SCHEDULING_POLICIES,
    )
    speculative_config: Mapping[str, Any] | None = setting(
        None,
        SCHEDULING,
        "speculative decoding: drafts several tokens, from a request's own text or with the model itself, and verifies "
        "them in one step; method is ngram, suffix, sparse or mtp, num_speculative_tokens the most drafted tokens, "
        "prompt_lookup_min and prompt_lookup_max the n-grams of ngram (default: off)",
        "-sc",
        parse=parse_speculative_config,
        metavar="JSON",
    )
    quality_meter: float = setting(
        0.0,
        SCHEDULING,
        "share of decode steps, 0 to 1, that measure whether the policy's budget is enough: each is computed twice, "
        "first with a quarter of the budget, and /metrics says how much the results differ; answers stay the same "
        "(default: 0)",
        metavar="RATE",
        check=Check(lambda rate: 0 <= rate <= 1, "must be a share of steps from 0 to 1"),
    )
    default_max_tokens: int = setting(
        1024,
        SAMPLING,
        "maximum output of a chat request that sets no limit; a completion without a limit gets 16 tokens, as in "
        "OpenAI's API",
        parse=parse_count,
        metavar="TOKENS",
        check=at_least(1),
    )
    max_logprobs: int = setting(
        20,
        SAMPLING,
        "maximum number of log probabilities of one token that a request may ask for; -1 allows the whole vocabulary",
        metavar="N",
        check=at_least(-1),
    )
    generation_config: str = setting(
        "auto",
        SAMPLING,
        "source of default sampling parameters: auto reads the model's generation_config.json, vllm reads none, and a "
        "directory is searched for that file",
        metavar="auto|vllm|DIR",
        check=Check(lambda value: value != "", "must be 'auto', 'vllm' or a directory, and not empty"),
    )
    override_generation_config: Mapping[str, Any] | None = setting(
        None,
        SAMPLING,
        "default sampling parameters that override the generation config: temperature, top_p, top_k, min_p, "
        "repetition_penalty, seed",
        parse=parse_object,
        metavar="JSON",
    )
    seed: int | None = setting(
        None, SAMPLING, "seed of requests that set none (default: random at each start)", metavar="N"
    )
    kv: str | KVSpec = setting(
        DEFAULT_POLICY,
        CACHE,
        f"cache policy: {POLICY_HELP}",
        parse=policy_name,
        metavar="POLICY",
        other=OtherFlag(
            "--kv-cache-dtype",
            policy_of_cache_dtype,
            "DTYPE",
            f"cache policy by vLLM's name: auto (the default policy), {', '.join(CACHE_DTYPES)}",
        ),
    )
    kv_dense_below: int | str = setting(
        "auto",
        CACHE,
        "sequences shorter than this are not compressed; auto is the length from which compression saves time, by "
        "model, policy and batch; 0 compresses as early as possible",
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
        "attention of long prompts: dense attends to all keys, sparse to sampled blocks of keys, auto is sparse on a "
        "GPU with kernels for it and dense elsewhere",
        metavar="STRATEGY",
        check=Check(is_prefill, f"is not one of {', '.join(PREFILL)}, nor a registered strategy"),
    )
    prefill_error: float | None = setting(
        None,
        CACHE,
        f"{PREFILL_ERROR_HELP} (default: {PREFILL_ERROR})",
        metavar="ERROR",
    )
    gpu_memory_utilization: float | None = setting(
        None,
        CACHE,
        "fraction of the GPU's memory to use, weights included (default: 0.9; on a CPU 0.4 of the free memory)",
        metavar="SHARE",
        check=SHARE,
    )
    host_memory_gib: float | None = setting(
        None,
        CACHE,
        "maximum pinned host memory for values, for policies that keep values on the host (default: what "
        "--max-num-seqs needs, at most half of the free memory)",
        metavar="GIB",
        check=NOT_NEGATIVE,
    )
    fetch_buffer: float | None = setting(
        None,
        CACHE,
        "size of the device buffer for values fetched from the host, as a multiple of what one decode step selects; "
        f"0 disables it (default: {FETCH_BUFFER}, on a CPU 0)",
        metavar="FACTOR",
        check=Check(lambda value: value == 0 or 1 <= value < math.inf, "must be 0 or a finite number of at least 1"),
    )
    mamba_ssm_cache_dtype: str = setting(
        "auto",
        CACHE,
        "data type of the recurrent states of linear-attention layers; bfloat16 halves their memory, and rounds them "
        "after every step; auto: float32",
        choices=STATE_DTYPES,
    )
    enable_prefix_caching: bool = setting(True, PREFIX_CACHE, "reuse the cache of prompts that begin alike")
    max_cached_seqs: int = setting(
        8, PREFIX_CACHE, "maximum number of finished sequences that stay on the device", metavar="N", check=at_least(0)
    )
    max_mamba_checkpoints: int | None = setting(
        None,
        PREFIX_CACHE,
        "number of checkpoints of recurrent states (linear attention) that device memory is reserved for; prompts can "
        "be continued there; 0: only at the end of finished sequences (default: --max-num-seqs + --max-cached-seqs)",
        parse=parse_count,
        metavar="N",
        check=at_least(0),
    )
    kv_offload_gib: float = setting(
        0.0,
        PREFIX_CACHE,
        "pinned host memory for copies of cached prompts, of all GPUs together (default: 0. With --kv-disk-dir: room "
        "for two sequences of the maximum length, at least 1 GiB and at most 16 GiB)",
        metavar="GIB",
        check=finite(0),
    )
    kv_disk_dir: str | None = setting(
        None,
        PREFIX_CACHE,
        "directory for copies of cached prompts; they outlive the server, and several servers can share them "
        "(default: no copies on disk)",
        metavar="DIR",
        check=NOT_EMPTY,
    )
    kv_disk_gib: float | None = setting(
        None,
        PREFIX_CACHE,
        f"maximum size of the files in --kv-disk-dir (default: {DISK_GIB:g})",
        metavar="GIB",
        check=finite(0, above=True),
    )
    eviction: str = setting(
        "lru",
        PREFIX_CACHE,
        "copies that host memory evicts first: lru the least recently used, graph those that the fewest requests and "
        "other copies build on",
        choices=tuple(POLICIES),
    )
    role: str = setting(
        "both",
        PREFIX_CACHE,
        "part in disaggregated serving: prefill answers once the prompt's cache is in --kv-disk-dir, decode waits "
        "there for the cache that a request names, both does what each request asks for",
        choices=ROLES,
    )

    def __post_init__(self) -> None:
        if wrong := wrong_types(self):
            raise SettingsError("; ".join(wrong), self.names())
        bad = violations(self)
        if self.kv_disk_gib is not None and self.kv_disk_dir is None:
            bad.append(f"kv_disk_gib={self.kv_disk_gib} has no meaning without kv_disk_dir, the directory of the files")
        if self.role in ROLES[1:] and self.kv_disk_dir is None:
            bad.append(f"role={self.role!r} needs kv_disk_dir, the directory that prefill and decode servers share")
        if self.max_mamba_checkpoints and not self.enable_prefix_caching:
            bad.append(
                f"max_mamba_checkpoints={self.max_mamba_checkpoints} has no meaning with enable_prefix_caching=False"
            )
        if (self.kv_offload_gib or self.kv_disk_dir) and not self.enable_prefix_caching:
            bad.append("kv_offload_gib and kv_disk_dir have no meaning with enable_prefix_caching=False")
        if self.tensor_parallel_size > 1 and self.device.startswith("cuda:"):
            bad.append(
                f"device={self.device!r} is one GPU: with tensor_parallel_size > 1 it must be 'cuda', which takes the "
                "first GPUs"
            )
        if self.speculative_config is not None:
            try:
                SpeculativeConfig.of(self.speculative_config)
            except ValueError as error:
                bad.append(f"speculative_config={as_json(dict(self.speculative_config)):.200}: {error}")
        if self.rope_theta is not None and "rope_theta" in (self.hf_overrides or {}):
            bad.append(f"rope_theta={self.rope_theta} is also in hf_overrides: set only one of them")
        if bad:
            raise SettingsError("; ".join(bad), self.names())

    def spec(self) -> KVSpec:
        """Returns the policy, in which settings that depend on the model can still be without a value. Raises
        ValueError for an unknown preset."""
        dense_below = None if isinstance(self.kv_dense_below, str) else self.kv_dense_below
        spec = preset(
            self.kv,
            dense_below=dense_below,
            prefill=None if self.prefill == "auto" else self.prefill,
            prefill_error=self.prefill_error,
        )
        method = None if self.speculation is None else self.speculation.method
        if method == "sparse":
            if spec.selects:
                raise self._refused_drafts(
                    f"kv={self.policy!r} selects tokens in every step, and these drafts need a policy that attends to "
                    "all of them, such as full or fp8"
                )
            return with_drafts(spec)
        if spec.drafts and method is not None:
            raise self._refused_drafts(f"kv={self.policy!r} has an index for drafts of method='sparse' alone")
        return spec

    def _refused_drafts(self, reason: str) -> SettingsError:
        given = dict(self.speculative_config or {})
        return SettingsError(f"speculative_config={given!r}: {reason}", ["kv", "speculative_config", "fetch_buffer"])

    def check_drafts(self, layout: Layout) -> None:
        """Raises SettingsError if tokens are drafted, but steps with a cache of ``layout`` cannot have drafts."""
        if self.speculation is None or layout.takes_drafts:
            return
        recurrent = "this model has layers with a recurrent state, which steps that draft would change; "
        if self.speculative_config is None:  # a policy that drafts by itself fetches no values
            raise SettingsError(f"kv={self.policy!r}: {recurrent}choose a policy without drafts, such as full", ["kv"])
        if layout.most_drafted == 0:
            methods = "choose method suffix or ngram, or mtp if the files have such a layer"
            raise self._refused_drafts(f"{recurrent}{methods}")
        raise self._refused_drafts(
            "the policy fetches values from the host into a buffer, in which two rows of a sequence would collide; set "
            "fetch_buffer=0, or choose a policy that keeps values on the device"
        )

    def refused_policy(self, error: ValueError) -> SettingsError:
        """Makes the error for a policy that was refused because of ``error``. The message names the settings of this
        config that chose the policy."""
        given: dict[str, Any] = {"prefill_error": self.prefill_error}
        if self.speculative_config is not None and self.speculation is not None and self.speculation.method == "sparse":
            given["speculative_config"] = dict(self.speculative_config)  # has added an index to the policy
        return refused_policy(error, self.kv if isinstance(self.kv, str) else None, **given)

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
    def speculation(self) -> SpeculativeConfig | None:
        """How tokens are drafted; None without speculative decoding. A policy with an index for drafts turns it on
        without ``speculative_config``."""
        if self.speculative_config is not None:
            return SpeculativeConfig.of(self.speculative_config)
        return SpeculativeConfig("sparse") if preset(self.kv).drafts else None

    @property
    def most_running(self) -> int:
        """Maximum number of sequences that run at once."""
        return self.max_num_seqs + SPARE_SEQS

    @property
    def drafts_with_head(self) -> bool:
        """Whether a layer of the checkpoint drafts tokens."""
        return self.speculation is not None and self.speculation.with_head

    @property
    def drafted_tokens(self) -> int:
        """Maximum number of drafted tokens of a sequence in a step; 0 without speculative decoding."""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens or 0

    @property
    def drafted_rows(self) -> int:
        """Maximum number of rows of a decode step for drafted tokens; 0 without speculative decoding."""
        return 0 if self.speculation is None else self.speculation.drafted_rows(self.most_running)

    @property
    def drafted_states(self) -> int:
        """Number of recurrent states for the drafted tokens of a decode step: one for each token. It is 0 with
        ``sparse`` drafts, which models with recurrent states cannot have: draft steps would change the states from
        which the drafts are verified."""
        return 0 if self.speculation is None or self.speculation.method == "sparse" else self.drafted_rows

    @property
    def max_rows(self) -> int:
        """Maximum number of rows of a decode step: one for each sequence, and those of drafted tokens."""
        return self.most_running + self.drafted_rows

    @property
    def disk_gib(self) -> float:
        """Limit on the files of the prefix cache, in GiB."""
        return DISK_GIB if self.kv_disk_gib is None else self.kv_disk_gib

    @property
    def policy(self) -> str:
        """The policy's name; ``custom`` for a KVSpec."""
        return self.kv if isinstance(self.kv, str) else "custom"

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> EngineConfig:
        """Makes the config from parsed flags."""
        return cls(**values_of(cls, args))

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Adds all flags to a parser, in groups."""
        add_flags(parser, EngineConfig)
        fields_of_policies = [f"--kv-{name}" for name in ("rank", "budget", "chunk", "outliers")]
        parser.add_argument(*fields_of_policies, action=_OfPolicy, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def check_states(model: ModelShape, **chosen: Any) -> None:
    """Raises SettingsError if ``model`` has no recurrent states, but a setting of such states is not the default.
    ``chosen`` are these settings: ``max_mamba_checkpoints`` and ``mamba_ssm_cache_dtype``."""
    given = {name: value for name, value in chosen.items() if value != getattr(EngineConfig, name)}
    if given and not model.recurrent:
        settings = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise SettingsError(f"{settings}: no layer of this model has a recurrent state; leave it out", given)


def refused_policy(error: ValueError, kv: str | None, **chosen: Any) -> SettingsError:
    """Makes the error for a refused policy. The message names the settings that chose the policy.

    Args:
        error: the reason. It names fields of the policy.
        kv: the policy's name; None for a ``KVSpec``.
        chosen: other settings that determine the policy, such as ``prefill_error``, by name; None for one that is not
            set.
    """
    given = {name: value for name, value in {"kv": kv, **chosen}.items() if value is not None}
    named = error.settings if isinstance(error, SettingsError) else ()
    prefix = f"{', '.join(f'{name}={value!r}' for name, value in given.items())}: " if given else ""
    return SettingsError(f"{prefix}{error}", (*given, *named))
