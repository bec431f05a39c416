"""Flags of ``vllm serve`` that this server has not: those without a meaning here, with which it starts and says so in a
line, and those that it refuses, with what to use instead. The table is docs/vllm.md's as well."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

PREFIX = "vllm_"
"""Of where parsed values go, so that they meet no flag of this server's own."""


@dataclass(frozen=True)
class VllmFlag:
    """A flag of vLLM's.

    Attributes:
        names: the long one first.
        words: why it has no effect, or is refused, and what to use instead.
        refused: whether the server does not start with it.
        value: whether it has any; else it is a switch, with ``--no-`` before its name to turn it off.
        fine: values that ask for nothing but what is so anyway, which need no words.
    """

    names: tuple[str, ...]
    words: str
    refused: bool
    value: bool = True
    fine: tuple[str, ...] = ()

    @property
    def dest(self) -> str:
        """Its attribute in a namespace of arguments."""
        return PREFIX + self.names[0].removeprefix("--").replace("-", "_")


def _no_effect(*names: str, words: str, value: bool = True, fine: tuple[str, ...] = ()) -> VllmFlag:
    return VllmFlag(names, words, False, value, fine)


def _refused(*names: str, words: str, value: bool = True, fine: tuple[str, ...] = ()) -> VllmFlag:
    return VllmFlag(names, words, True, value, fine)


_ADAPTER = "one PEFT adapter is merged at load: --adapter DIR"
_EXPERTS = "models are dense, without experts; --tensor-parallel-size N cuts them up"
_HOSTS = "an engine has the GPUs of one machine; on several machines replicas answer: shadowkv ray serve --replicas N"
_PROMPTS = "long prompts take turns by themselves"
_SPECULATIVE = "no drafted tokens; --kv turbo makes steps of long contexts faster"
_PLUGINS = "the server runs no code of its users"
_OFFLOAD = "copies of cached prompts in host memory: --kv-offload-gib GIB"

FLAGS = (
    _no_effect("--enable-chunked-prefill", words="always on: long prompts pause for decode steps", value=False),
    _no_effect("--swap-space", words="no sequence is ever preempted; for copies of cached prompts: --kv-offload-gib"),
    _no_effect("--block-size", words="pages have 64 tokens"),
    _no_effect("--num-gpu-blocks-override", words="pages take what --gpu-memory-utilization leaves"),
    _no_effect("--prefix-caching-hash-algo", words="names of pages are chosen by the engine"),
    _no_effect("--max-num-partial-prefills", words=_PROMPTS),
    _no_effect("--max-long-partial-prefills", words=_PROMPTS),
    _no_effect("--long-prefill-token-threshold", words=_PROMPTS),
    _no_effect("--async-scheduling", words="the engine is a process of its own", value=False),
    _no_effect("--num-scheduler-steps", words="a step is one token of every sequence", fine=("1",)),
    _no_effect("--max-seq-len-to-capture", words="CUDA graphs serve every length; --enforce-eager: none"),
    _no_effect("--compilation-config", "-O", "-cc", words="there are no levels of it; --enforce-eager: no CUDA graphs"),
    _no_effect("--disable-custom-all-reduce", words="there is none to turn off", value=False),
    _no_effect("--distributed-executor-backend", words="ranks are processes of this machine", fine=("mp",)),
    _no_effect("--max-parallel-loading-workers", words="every rank loads its own part"),
    _no_effect("--trust-remote-code", words="a checkpoint's code is never run", value=False),
    _no_effect("--code-revision", words="a checkpoint's code is never run"),
    _no_effect("--model-impl", words="models are the engine's own", fine=("auto",)),
    _no_effect("--limit-mm-per-prompt", words="models take text alone"),
    _no_effect("--structured-outputs-config", words="xgrammar writes by schemas", fine=("auto", "xgrammar")),
    _no_effect("--guided-decoding-backend", words="xgrammar writes by schemas", fine=("auto", "xgrammar")),
    _no_effect("--chat-template-content-format", words="templates get texts", fine=("auto", "string")),
    _no_effect("--max-logprobs", words="a request may ask for up to 20", fine=("20",)),
    _no_effect("--disable-log-stats", words="figures are at /metrics and never logged", value=False),
    _no_effect("--enable-log-requests", words="always on; --disable-log-requests turns it off", value=False),
    _no_effect("--max-log-len", words="prompts are never logged"),
    _no_effect("--enable-request-id-headers", words="always on", value=False),
    _no_effect("--enable-prompt-tokens-details", words="always on", value=False),
    _no_effect("--enable-tokenizer-info-endpoint", words="always on", value=False),
    _refused("--enable-lora", words=_ADAPTER, value=False),
    _refused("--lora-modules", words=_ADAPTER),
    _refused("--max-loras", words=_ADAPTER),
    _refused("--max-lora-rank", words=_ADAPTER),
    _refused("--pipeline-parallel-size", "-pp", words="layers stay together: --tensor-parallel-size N", fine=("1",)),
    _refused("--data-parallel-size", "-dp", words="replicas on Ray: shadowkv ray serve --replicas N", fine=("1",)),
    _refused("--decode-context-parallel-size", "-dcp", words="a cache is cut up by heads alone", fine=("1",)),
    _refused("--enable-expert-parallel", "-ep", words=_EXPERTS, value=False),
    _refused("--nnodes", words=_HOSTS, fine=("1",)),
    _refused("--speculative-config", "-sc", words=_SPECULATIVE),
    _refused("--cpu-offload-gb", words="weights stay on the device; smaller ones: --quantization fp8", fine=("0",)),
    _refused("--kv-cache-memory-bytes", words="a share of the device: --gpu-memory-utilization SHARE"),
    _refused("--kv-offloading-size", words=_OFFLOAD),
    _refused("--kv-transfer-config", words="files of a shared directory: --kv-disk-dir DIR, with --role"),
    _refused("--kv-cache-dtype-skip-layers", words="a policy has a number of them: --kv turboquant-4:skip_layers=2"),
    _refused("--rope-scaling", words="""--hf-overrides '{"rope_scaling": {...}}'"""),
    _refused("--hf-config-path", words="--hf-overrides JSON replaces entries of the model's config.json"),
    _refused("--config-format", words="a Hugging Face directory or a .gguf file", fine=("auto", "hf")),
    _refused("--tokenizer-mode", words="the model's tokenizer.json, or that of --tokenizer", fine=("auto", "hf")),
    _refused("--tokenizer-revision", words="--revision is for both"),
    _refused("--skip-tokenizer-init", words="the API takes and gives text", value=False),
    _refused("--hf-token", words="set it as HF_TOKEN: a command line is visible to every user of the machine"),
    _refused("--runner", words="models generate text, and embed none", fine=("auto", "generate")),
    _refused("--task", words="models generate text, and embed none", fine=("auto", "generate")),
    _refused("--scheduling-policy", words="requests are served as they come", fine=("fcfs",)),
    _refused("--middleware", words=_PLUGINS),
    _refused("--tool-parser-plugin", words=f"{_PLUGINS}; --tool-call-parser has the known formats"),
    _refused("--uds", words="--host and --port"),
    _refused("--enable-sleep-mode", words="weights and cache stay on the device", value=False),
)


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them all, without a word in ``--help``: ``vllm_notes`` reads what was given."""
    for flag in FLAGS:
        # A refused one may have any number of values: nothing else is to be said of them.
        values: dict[str, object] = {"action": argparse.BooleanOptionalAction}
        if flag.value:
            values = {"nargs": "*" if flag.refused else 1}
        parser.add_argument(*flag.names, dest=flag.dest, default=None, help=argparse.SUPPRESS, **values)  # type: ignore[arg-type]


def vllm_notes(args: argparse.Namespace) -> Iterator[str]:
    """A line for each flag that was given and has no effect; raises ValueError for those that are refused."""
    refused = []
    for flag in FLAGS:
        given = getattr(args, flag.dest)
        if given is None or (flag.refused and given is False):
            continue
        if flag.value and flag.fine and len(given) == 1 and given[0] in flag.fine:
            continue
        name = flag.names[0] if given is not False else f"--no-{flag.names[0].removeprefix('--')}"
        if flag.refused:
            refused.append(f"{shlex.join([name, *(given if flag.value else [])])} is not supported: {flag.words}")
        else:
            yield f"{name} has no effect: {flag.words}"
    if refused:
        raise ValueError("; ".join(refused))
