"""vLLM's flags that have no counterpart here: some are accepted with a note that they have no effect, and others are
refused with what to use instead. The tables in docs/vllm.md have the same rows."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "vllm_"
"""Prefix of the attributes that parsed values are stored in, so that they do not collide with this server's flags."""


@dataclass(frozen=True)
class VllmFlag:
    """A flag of vLLM's.

    Attributes:
        names: the long one first.
        reason: why it has no effect or is refused, and what to use instead.
        refused: whether the server does not start with it.
        values: number of its values, ``+`` for one or more; 0 is a switch with a ``--no-`` form.
        fine: values that ask for what is the case anyway; they are accepted without a note.
    """

    names: tuple[str, ...]
    reason: str
    refused: bool
    values: int | str = 1
    fine: tuple[str, ...] = ()

    @property
    def dest(self) -> str:
        """Its attribute in a namespace of arguments."""
        return PREFIX + self.names[0].removeprefix("--").replace("-", "_")


def _flag(usage: str, reason: str, refused: bool, fine: tuple[str, ...]) -> VllmFlag:
    """A flag by its usage: names, then ``N`` for a value and ``N+`` for one or more."""
    words = usage.split()
    values: int | str = {"N": 1, "N+": "+"}.get(words[-1], 0)
    return VllmFlag(tuple(word for word in words if word.startswith("-")), reason, refused, values, fine)


def _no_effect(reason: str, *usages: str, fine: tuple[str, ...] = ()) -> list[VllmFlag]:
    return [_flag(usage, reason, False, fine) for usage in usages]


def _refused(reason: str, *usages: str, fine: tuple[str, ...] = ()) -> list[VllmFlag]:
    return [_flag(usage, reason, True, fine) for usage in usages]


_REPLICAS = "use replicas on Ray instead: shadowkv ray serve --replicas N"
_HOSTS = "an engine uses the GPUs of one machine; replicas can run on several: shadowkv ray serve --replicas N"
_NO_EMBEDDINGS = "the server only generates text, it makes no embeddings"
_PLUGINS = "the server runs no code of its users"

FLAGS = (
    *_no_effect("always on: decode steps run between the chunks of a long prompt", "--enable-chunked-prefill"),
    *_no_effect(
        "sequences are never preempted; --kv-offload-gib keeps cached prompts in host memory", "--swap-space N"
    ),
    *_no_effect("a page of the cache always has 64 tokens", "--block-size N"),
    *_no_effect("--gpu-memory-utilization sets the size of the cache", "--num-gpu-blocks-override N"),
    *_no_effect("the engine chooses the ids of cached pages", "--prefix-caching-hash-algo N"),
    *_no_effect(
        "the engine schedules long prompts by itself",
        *("--max-num-partial-prefills N", "--max-long-partial-prefills N", "--long-prefill-token-threshold N"),
    ),
    *_no_effect("the engine always runs in a process of its own", "--async-scheduling"),
    *_no_effect("a step always makes one token per sequence", "--num-scheduler-steps N", fine=("1",)),
    *_no_effect("CUDA graphs cover every length; --enforce-eager disables them", "--max-seq-len-to-capture N"),
    *_no_effect(
        "the engine chooses the batch sizes of CUDA graphs; --enforce-eager disables them",
        *("--cuda-graph-sizes --cudagraph-capture-sizes N+", "--max-cudagraph-capture-size N"),
    ),
    *_no_effect(
        "there are no optimization levels; --enforce-eager disables CUDA graphs",
        *("--compilation-config -cc N", "--optimization-level -O N"),
    ),
    *_no_effect("there is only one block manager", "--use-v2-block-manager"),
    *_no_effect("sequences are never preempted", "--preemption-mode N"),
    *_no_effect("there is no speculative decoding", "--num-lookahead-slots N"),
    *_no_effect("there is no cascade attention", "--disable-cascade-attn"),
    *_no_effect("there is no hybrid KV cache manager", "--disable-hybrid-kv-cache-manager"),
    *_no_effect("scales of an fp8 cache are always computed from the prompt", "--calculate-kv-scales"),
    *_no_effect("the engine uses its own workers", "--worker-cls N", fine=("auto",)),
    *_no_effect("start the server with numactl to bind its processes to NUMA nodes", "--numa-bind"),
    *_no_effect("all processes run on this machine, without Ray", "--distributed-executor-backend N", fine=("mp",)),
    *_no_effect("each GPU's process loads its own part of the weights", "--max-parallel-loading-workers N"),
    *_no_effect("the tokenizer is always loaded; prompts can also be token ids", "--skip-tokenizer-init"),
    *_no_effect("code in a model's repository is never run", "--trust-remote-code", "--code-revision N"),
    *_no_effect("the engine uses its own implementation of the model", "--model-impl N", fine=("auto",)),
    *_no_effect(
        "models take text only", "--limit-mm-per-prompt N", "--mm-processor-kwargs N", "--mm-processor-cache-gb N"
    ),
    *_no_effect(
        "xgrammar is the only backend of structured outputs",
        *("--structured-outputs-config N", "--guided-decoding-backend N"),
        fine=("auto", "xgrammar"),
    ),
    *_no_effect(
        "requests can set disable_any_whitespace in structured_outputs", "--guided-decoding-disable-any-whitespace"
    ),
    *_no_effect("--reasoning-parser alone enables reasoning", "--enable-reasoning"),
    *_no_effect("the prompt always has the tools of the request", "--exclude-tools-when-tool-choice-none"),
    *_no_effect("the role of responses is always assistant", "--response-role N", fine=("assistant",)),
    *_no_effect("tokens are streamed as soon as they are generated", "--stream-interval N", fine=("1",)),
    *_no_effect(
        "templates get a message's content as a string", "--chat-template-content-format N", fine=("auto", "string")
    ),
    *_no_effect("statistics are never logged; they are at /metrics", "--disable-log-stats"),
    *_no_effect("always on; --disable-log-requests turns it off", "--enable-log-requests"),
    *_no_effect("prompts are never logged", "--max-log-len N"),
    *_no_effect("always on; /load shows the load", "--enable-server-load-tracking"),
    *_no_effect("--otlp-traces-endpoint alone sends the times of each request", "--collect-detailed-traces N+"),
    *_no_effect("/docs is always served; it describes the API only", "--disable-fastapi-docs"),
    *_no_effect("--h11-max-incomplete-event-size limits the size of a header instead", "--h11-max-header-count N"),
    *_no_effect(
        "always on",
        *("--enable-request-id-headers", "--enable-prompt-tokens-details", "--enable-tokenizer-info-endpoint"),
    ),
    *_refused(
        "one PEFT adapter can be merged into the weights at load: --adapter DIR",
        *("--enable-lora", "--lora-modules N+", "--max-loras N", "--max-lora-rank N", "--fully-sharded-loras"),
    ),
    *_refused("use --tensor-parallel-size N to split the model", "--pipeline-parallel-size -pp N", fine=("1",)),
    *_refused(_REPLICAS, "--data-parallel-size -dp N", "--data-parallel-size-local -dpl N", fine=("1",)),
    *_refused(_REPLICAS, "--data-parallel-backend -dpb N", fine=("mp",)),
    *_refused("the cache is split across GPUs by heads only", "--decode-context-parallel-size -dcp N", fine=("1",)),
    *_refused(
        "experts stay on the GPU that loaded them; --enable-expert-parallel gives each GPU whole experts",
        *("--enable-eplb", "--enable-dbo"),
    ),
    *_refused(_HOSTS, "--nnodes -n N", fine=("1",)),
    *_refused(_HOSTS, "--node-rank -r N", fine=("0",)),
    *_refused(_HOSTS, "--master-addr N", fine=("127.0.0.1",)),
    *_refused(_HOSTS, "--headless"),
    *_refused("there is no speculative decoding; --kv turbo makes decode steps faster", "--speculative-config -sc N"),
    *_refused("weights stay on the GPU; --quantization fp8 makes them smaller", "--cpu-offload-gb N", fine=("0",)),
    *_refused("set a fraction of the GPU's memory: --gpu-memory-utilization SHARE", "--kv-cache-memory-bytes N"),
    *_refused("use --kv-offload-gib GIB, which keeps cached prompts in host memory", "--kv-offloading-size N"),
    *_refused("caches are transferred as files: use --kv-disk-dir DIR and --role", "--kv-transfer-config N"),
    *_refused("no events are sent; statistics of the cache are at /metrics", "--kv-events-config N"),
    *_refused("set their number in the policy: --kv turboquant-4:skip_layers=2", "--kv-cache-dtype-skip-layers N+"),
    *_refused("""use --hf-overrides '{"rope_scaling": {...}}'""", "--rope-scaling N"),
    *_refused(
        "layers keep their sliding window; --max-model-len with the size of the window has the same effect",
        "--disable-sliding-window",
    ),
    *_refused("use --hf-overrides JSON to replace entries of the model's config.json", "--hf-config-path N"),
    *_refused("MODEL must be a Hugging Face model or a .gguf file", "--config-format N", fine=("auto", "hf")),
    *_refused("--load-format has no further settings", "--model-loader-extra-config N"),
    *_refused(
        "only files that are needed are downloaded; MODEL can also be a directory with some of the files",
        "--ignore-patterns N+",
        fine=("original/**/*",),
    ),
    *_refused(
        "the tokenizer is the model's tokenizer.json, or that of --tokenizer", "--tokenizer-mode N", fine=("auto", "hf")
    ),
    *_refused("--revision holds for the model and its tokenizer", "--tokenizer-revision N"),
    *_refused("set HF_TOKEN in the environment; every user of the machine can read a command line", "--hf-token N"),
    *_refused(_NO_EMBEDDINGS, "--runner N", "--task N", fine=("auto", "generate")),
    *_refused(_NO_EMBEDDINGS, "--convert N", fine=("auto", "none")),
    *_refused("a prompt is a text or token ids", "--enable-prompt-embeds"),
    *_refused("models take text only; leave it out", "--allowed-local-media-path N", fine=("",)),
    *_refused(
        "log probabilities are the model's own, before temperature and penalties (raw_logprobs)",
        "--logprobs-mode N",
        fine=("raw_logprobs",),
    ),
    *_refused(f"{_PLUGINS}; a request can set logit_bias and penalties", "--logits-processors N+"),
    *_refused(_PLUGINS, "--middleware N"),
    *_refused(f"{_PLUGINS}; --tool-call-parser lists the supported formats", "--tool-parser-plugin N"),
    *_refused("the ciphers are Python's defaults; for others, let a proxy end TLS", "--ssl-ciphers N"),
    *_refused("restart the server to load a new certificate, or let a proxy end TLS", "--enable-ssl-refresh"),
    *_refused("the log goes to stderr; --uvicorn-log-level LEVEL sets its level", "--log-config-file N"),
    *_refused("weights and cache stay on the GPU", "--enable-sleep-mode"),
)

KEYWORDS = frozenset(flag.dest.removeprefix(PREFIX) for flag in FLAGS)
"""Names of these flags as keywords of ``LLM``."""


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Adds all of them, without listing them in ``--help``; ``vllm_notes`` checks those that were given."""
    for flag in FLAGS:
        values: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if flag.values:  # one value may be an object, which the dotted form writes
            values = {"nargs": flag.values, "metavar": "JSON"}
        parser.add_argument(*flag.names, dest=flag.dest, default=None, help=argparse.SUPPRESS, **values)


def vllm_keywords(options: Mapping[str, Any]) -> argparse.Namespace:
    """Keywords of ``LLM`` as the arguments that ``vllm_notes`` checks; keywords that are no vLLM flags are left out."""
    given = {}
    for flag in FLAGS:
        value = options.get(flag.dest.removeprefix(PREFIX))
        if value is not None and flag.values:
            value = [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
        given[flag.dest] = value
    return argparse.Namespace(**given)


def vllm_notes(args: argparse.Namespace) -> Iterator[str]:
    """A note for each given flag that has no effect; raises ValueError if refused flags are given."""
    refused = []
    for flag in FLAGS:
        given = getattr(args, flag.dest)
        if given is None or (flag.refused and given is False):
            continue
        if flag.fine and len(given) == 1 and given[0] in flag.fine:
            continue
        name = flag.names[0] if given is not False else f"--no-{flag.names[0].removeprefix('--')}"
        if flag.refused:
            refused.append(f"{shlex.join([name, *(given if flag.values else [])])} is not supported: {flag.reason}")
        else:
            yield f"{name} has no effect: {flag.reason}"
    if refused:
        raise ValueError("; ".join(refused))
