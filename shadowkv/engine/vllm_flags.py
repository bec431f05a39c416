"""Flags of vLLM that this engine and its server have not: those without a meaning here, accepted with a line that says
so, and those that are refused, with what to use instead. The table is docs/vllm.md's as well."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "vllm_"
"""Of where parsed values go, so that they meet no flag of this server's own."""


@dataclass(frozen=True)
class VllmFlag:
    """A flag of vLLM's.

    Attributes:
        names: the long one first.
        words: why it has no effect, or is refused, and what to use instead.
        refused: whether the server does not start with it.
        values: how many it has, ``+`` for one or more; with 0 it is a switch, with ``--no-`` before its name to turn
            it off.
        fine: values that ask for nothing but what is so anyway, which need no words.
    """

    names: tuple[str, ...]
    words: str
    refused: bool
    values: int | str = 1
    fine: tuple[str, ...] = ()

    @property
    def dest(self) -> str:
        """Its attribute in a namespace of arguments."""
        return PREFIX + self.names[0].removeprefix("--").replace("-", "_")


def _no_effect(*names: str, words: str, values: int | str = 1, fine: tuple[str, ...] = ()) -> VllmFlag:
    return VllmFlag(names, words, False, values, fine)


def _refused(*names: str, words: str, values: int | str = 1, fine: tuple[str, ...] = ()) -> VllmFlag:
    return VllmFlag(names, words, True, values, fine)


_ADAPTER = "one PEFT adapter is merged at load: --adapter DIR"
_EXPERTS = "experts stay where they are loaded; --enable-expert-parallel: whole ones on every GPU"
_HOSTS = "an engine has the GPUs of one machine; on several machines replicas answer: shadowkv ray serve --replicas N"
_PROMPTS = "long prompts take turns by themselves"
_SPECULATIVE = "no drafted tokens; --kv turbo makes steps of long contexts faster"
_PLUGINS = "the server runs no code of its users"
_SKIPPED_LAYERS = "a policy has a number of them: --kv turboquant-4:skip_layers=2"
_REPLICAS = "replicas on Ray: shadowkv ray serve --replicas N"
_NO_CODE = "a checkpoint's code is never run"
_NO_MEDIA = "models take text alone"
_NO_EMBEDDINGS = "models generate text, and embed none"
_WINDOWS = "layers keep their windows; the same without one: --max-model-len with the window's size"
_FILES = "only files that are read are fetched; MODEL may be a folder that has those alone"
_LOGPROBS = "logprobs are the model's own, before temperature and penalties: raw_logprobs"
_LEVELS = "there are no levels of it; --enforce-eager: no CUDA graphs"
_GRAPHS = "the engine chooses the sizes of batches that are captured; --enforce-eager: none"
_WHITE_SPACE = "a request has structured_outputs with disable_any_whitespace"
_TOOLS = "tools stay in the prompt, so a request leaves them out"
_OFFLOAD = "copies of cached prompts in host memory: --kv-offload-gib GIB"

FLAGS = (
    _no_effect("--enable-chunked-prefill", words="always on: long prompts pause for decode steps", values=0),
    _no_effect("--swap-space", words="no sequence is ever preempted; for copies of cached prompts: --kv-offload-gib"),
    _no_effect("--block-size", words="pages have 64 tokens"),
    _no_effect("--num-gpu-blocks-override", words="pages take what --gpu-memory-utilization leaves"),
    _no_effect("--prefix-caching-hash-algo", words="names of pages are chosen by the engine"),
    _no_effect("--max-num-partial-prefills", words=_PROMPTS),
    _no_effect("--max-long-partial-prefills", words=_PROMPTS),
    _no_effect("--long-prefill-token-threshold", words=_PROMPTS),
    _no_effect("--async-scheduling", words="the engine is a process of its own", values=0),
    _no_effect("--num-scheduler-steps", words="a step is one token of every sequence", fine=("1",)),
    _no_effect("--max-seq-len-to-capture", words="CUDA graphs serve every length; --enforce-eager: none"),
    _no_effect("--cuda-graph-sizes", "--cudagraph-capture-sizes", words=_GRAPHS, values="+"),
    _no_effect("--max-cudagraph-capture-size", words=_GRAPHS),
    _no_effect("--compilation-config", "-cc", words=_LEVELS),
    _no_effect("--optimization-level", "-O", words=_LEVELS),
    _no_effect("--use-v2-block-manager", words="there is one manager of pages", values=0),
    _no_effect("--preemption-mode", words="no sequence is ever preempted"),
    _no_effect("--num-lookahead-slots", words="no drafted tokens"),
    _no_effect("--disable-cascade-attn", words="there is none to turn off", values=0),
    _no_effect("--disable-hybrid-kv-cache-manager", words="there is none to turn off", values=0),
    _no_effect("--calculate-kv-scales", words="scales of fp8 are always learned from the prompt", values=0),
    _no_effect("--worker-cls", words="workers are the engine's own", fine=("auto",)),
    _no_effect("--numa-bind", words="the system places processes; numactl before the command binds them", values=0),
    _no_effect("--distributed-executor-backend", words="ranks are processes of this machine", fine=("mp",)),
    _no_effect("--max-parallel-loading-workers", words="every rank loads its own part"),
    _no_effect(
        "--skip-tokenizer-init", words="requests may have token ids, and return_token_ids; texts, too", values=0
    ),
    _no_effect("--trust-remote-code", words=_NO_CODE, values=0),
    _no_effect("--code-revision", words=_NO_CODE),
    _no_effect("--model-impl", words="models are the engine's own", fine=("auto",)),
    _no_effect("--limit-mm-per-prompt", words=_NO_MEDIA),
    _no_effect("--mm-processor-kwargs", words=_NO_MEDIA),
    _no_effect("--mm-processor-cache-gb", words=_NO_MEDIA),
    _no_effect("--structured-outputs-config", words="xgrammar writes by schemas", fine=("auto", "xgrammar")),
    _no_effect("--guided-decoding-backend", words="xgrammar writes by schemas", fine=("auto", "xgrammar")),
    _no_effect("--guided-decoding-disable-any-whitespace", words=_WHITE_SPACE, values=0),
    _no_effect("--enable-reasoning", words="--reasoning-parser is enough", values=0),
    _no_effect("--exclude-tools-when-tool-choice-none", words=_TOOLS, values=0),
    _no_effect("--response-role", words="answers are the assistant's", fine=("assistant",)),
    _no_effect("--stream-interval", words="tokens are sent as they come", fine=("1",)),
    _no_effect("--chat-template-content-format", words="templates get texts", fine=("auto", "string")),
    _no_effect("--disable-log-stats", words="figures are at /metrics and never logged", values=0),
    _no_effect("--enable-log-requests", words="always on; --disable-log-requests turns it off", values=0),
    _no_effect("--max-log-len", words="prompts are never logged"),
    _no_effect("--enable-server-load-tracking", words="always on: /load says the load", values=0),
    _no_effect("--collect-detailed-traces", words="--otlp-traces-endpoint has a request's times", values="+"),
    _no_effect("--disable-fastapi-docs", words="/docs describes the API and nothing of the server's", values=0),
    _no_effect("--h11-max-header-count", words="--h11-max-incomplete-event-size limits headers by their bytes"),
    _no_effect("--enable-request-id-headers", words="always on", values=0),
    _no_effect("--enable-prompt-tokens-details", words="always on", values=0),
    _no_effect("--enable-tokenizer-info-endpoint", words="always on", values=0),
    _refused("--enable-lora", words=_ADAPTER, values=0),
    _refused("--lora-modules", words=_ADAPTER, values="+"),
    _refused("--max-loras", words=_ADAPTER),
    _refused("--max-lora-rank", words=_ADAPTER),
    _refused("--fully-sharded-loras", words=_ADAPTER, values=0),
    _refused("--pipeline-parallel-size", "-pp", words="layers stay together: --tensor-parallel-size N", fine=("1",)),
    _refused("--data-parallel-size", "-dp", words=_REPLICAS, fine=("1",)),
    _refused("--data-parallel-size-local", "-dpl", words=_REPLICAS, fine=("1",)),
    _refused("--data-parallel-backend", "-dpb", words=_REPLICAS, fine=("mp",)),
    _refused("--decode-context-parallel-size", "-dcp", words="a cache is cut up by heads alone", fine=("1",)),
    _refused("--enable-eplb", words=_EXPERTS, values=0),
    _refused("--enable-dbo", words=_EXPERTS, values=0),
    _refused("--nnodes", "-n", words=_HOSTS, fine=("1",)),
    _refused("--node-rank", "-r", words=_HOSTS, fine=("0",)),
    _refused("--master-addr", words=_HOSTS, fine=("127.0.0.1",)),
    _refused("--headless", words=_HOSTS, values=0),
    _refused("--speculative-config", "-sc", words=_SPECULATIVE),
    _refused("--cpu-offload-gb", words="weights stay on the device; smaller ones: --quantization fp8", fine=("0",)),
    _refused("--kv-cache-memory-bytes", words="a share of the device: --gpu-memory-utilization SHARE"),
    _refused("--kv-offloading-size", words=_OFFLOAD),
    _refused("--kv-transfer-config", words="files of a shared directory: --kv-disk-dir DIR, with --role"),
    _refused("--kv-events-config", words="no events are sent; figures of the cache are at /metrics"),
    _refused("--kv-cache-dtype-skip-layers", words=_SKIPPED_LAYERS, values="+"),
    _refused("--rope-scaling", words="""--hf-overrides '{"rope_scaling": {...}}'"""),
    _refused("--disable-sliding-window", words=_WINDOWS, values=0),
    _refused("--hf-config-path", words="--hf-overrides JSON replaces entries of the model's config.json"),
    _refused("--config-format", words="a Hugging Face directory or a .gguf file", fine=("auto", "hf")),
    _refused(
        "--model-loader-extra-config", words="--load-format has no settings; weights are read in the files' order"
    ),
    _refused("--ignore-patterns", words=_FILES, values="+", fine=("original/**/*",)),
    _refused("--tokenizer-mode", words="the model's tokenizer.json, or that of --tokenizer", fine=("auto", "hf")),
    _refused("--tokenizer-revision", words="--revision is for both"),
    _refused("--hf-token", words="set it as HF_TOKEN: a command line is visible to every user of the machine"),
    _refused("--runner", words=_NO_EMBEDDINGS, fine=("auto", "generate")),
    _refused("--task", words=_NO_EMBEDDINGS, fine=("auto", "generate")),
    _refused("--convert", words=_NO_EMBEDDINGS, fine=("auto", "none")),
    _refused("--enable-prompt-embeds", words="a prompt is a text or token ids", values=0),
    _refused("--allowed-local-media-path", words="models take text alone: leave it out", fine=("",)),
    _refused("--logprobs-mode", words=_LOGPROBS, fine=("raw_logprobs",)),
    _refused("--logits-processors", words=f"{_PLUGINS}; a request has logit_bias and penalties", values="+"),
    _refused("--middleware", words=_PLUGINS),
    _refused("--tool-parser-plugin", words=f"{_PLUGINS}; --tool-call-parser has the known formats"),
    _refused("--ssl-ciphers", words="they are Python's own; others need a proxy that ends TLS"),
    _refused("--enable-ssl-refresh", words="a new certificate needs a restart, or a proxy that ends TLS", values=0),
    _refused("--log-config-file", words="the log goes to stderr: --uvicorn-log-level LEVEL"),
    _refused("--enable-sleep-mode", words="weights and cache stay on the device", values=0),
)


KEYWORDS = frozenset(flag.dest.removeprefix(PREFIX) for flag in FLAGS)
"""The same in Python."""


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them all, without a word in ``--help``: ``vllm_notes`` reads what was given."""
    for flag in FLAGS:
        values: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if flag.values:  # one value may be an object, which the dotted form writes
            values = {"nargs": flag.values, "metavar": "JSON"}
        parser.add_argument(*flag.names, dest=flag.dest, default=None, help=argparse.SUPPRESS, **values)


def vllm_keywords(options: Mapping[str, Any]) -> argparse.Namespace:
    """Python's keywords for ``vllm_notes``, of which True and False are switches; others are left out."""
    given = {}
    for flag in FLAGS:
        value = options.get(flag.dest.removeprefix(PREFIX))
        if value is not None and flag.values:
            value = [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
        given[flag.dest] = value
    return argparse.Namespace(**given)


def vllm_notes(args: argparse.Namespace) -> Iterator[str]:
    """A line for each flag that was given and has no effect; raises ValueError for those that are refused."""
    refused = []
    for flag in FLAGS:
        given = getattr(args, flag.dest)
        if given is None or (flag.refused and given is False):
            continue
        if flag.fine and len(given) == 1 and given[0] in flag.fine:
            continue
        name = flag.names[0] if given is not False else f"--no-{flag.names[0].removeprefix('--')}"
        if flag.refused:
            refused.append(f"{shlex.join([name, *(given if flag.values else [])])} is not supported: {flag.words}")
        else:
            yield f"{name} has no effect: {flag.words}"
    if refused:
        raise ValueError("; ".join(refused))
