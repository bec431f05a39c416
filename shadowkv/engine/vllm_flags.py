"""vLLM's flags without a counterpart here. Some are accepted with a note that they have no effect; the others are
refused, with what to use instead. The tables in docs/vllm.md have the same rows."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "vllm_"
"""Prefix of these flags' attributes in parsed arguments, so that the attributes do not collide with those of this
server's flags."""

VALUES: Mapping[str, int | str] = {"N": 1, "N+": "+"}
"""Number of a flag's values (argparse's ``nargs``), for each word that stands for values in a flag's usage."""


DATA_PARALLEL_SIZE = "--data-parallel-size"
"""A flag that only ``shadowkv serve`` supports."""


@dataclass(frozen=True)
class VllmFlag:
    """A flag of vLLM.

    Attributes:
        names: the flag's names, the long one first.
        reason: why it has no effect or is refused, and what to use instead.
        refused: whether the server refuses to start with it.
        values: number of its values, ``+`` for one or more; 0 is a switch with a ``--no-`` form.
        fine: values that match the server's behaviour. They are accepted without a note.
    """

    names: tuple[str, ...]
    reason: str
    refused: bool
    values: int | str
    fine: tuple[str, ...]

    @classmethod
    def of(cls, usage: str, reason: str, refused: bool) -> VllmFlag:
        """Parses a flag's usage from the tables below."""
        words, has_fine, fine = usage.partition("=")
        *names, last = words.split()
        if last not in VALUES:
            names.append(last)
        known = tuple(fine.split("|")) if has_fine else ()
        return cls(tuple(names), reason, refused, VALUES.get(last, 0), known)

    @property
    def dest(self) -> str:
        """The flag's attribute in parsed arguments."""
        return PREFIX + self.names[0].removeprefix("--").replace("-", "_")


NO_EFFECT = {
    "always on: decode steps run between the chunks of a long prompt": "--enable-chunked-prefill",
    "sequences are never preempted; --kv-offload-gib keeps cached prompts in host memory": "--swap-space N",
    "a page of the cache always has 64 tokens": "--block-size N",
    "--gpu-memory-utilization sets the size of the cache": "--num-gpu-blocks-override N",
    "the engine chooses the ids of cached pages": "--prefix-caching-hash-algo N",
    "the engine schedules long prompts by itself": (
        "--max-num-partial-prefills N, --max-long-partial-prefills N, --long-prefill-token-threshold N"
    ),
    "the engine always runs in a process of its own": "--async-scheduling",
    "a step makes one token per sequence, and more with --speculative-config": "--num-scheduler-steps N=1",
    "CUDA graphs cover every length; --enforce-eager disables them": "--max-seq-len-to-capture N",
    "the engine chooses the batch sizes of CUDA graphs; --enforce-eager disables them": (
        "--cuda-graph-sizes --cudagraph-capture-sizes N+, --max-cudagraph-capture-size N"
    ),
    "there are no optimization levels; --enforce-eager disables CUDA graphs": (
        "--compilation-config -cc N, --optimization-level -O N"
    ),
    "there is only one block manager": "--use-v2-block-manager",
    "sequences are never preempted": "--preemption-mode N",
    "drafted tokens use the memory reserved for the rest of the answer": "--num-lookahead-slots N",
    "there is no cascade attention": "--disable-cascade-attn",
    "states are kept every 8192 prompt tokens and at the end of a prompt; --max-mamba-checkpoints limits how many": (
        "--mamba-cache-mode N=align, --mamba-block-size N"
    ),
    "--mamba-ssm-cache-dtype sets the type of recurrent states; inputs of convolutions are float32": (
        "--mamba-cache-dtype N=auto|float32"
    ),
    "there is no hybrid KV cache manager": "--disable-hybrid-kv-cache-manager",
    "scales of an fp8 cache are always computed from the prompt": "--calculate-kv-scales",
    "the engine uses its own workers": "--worker-cls N=auto",
    "start the server with numactl to bind its processes to NUMA nodes": "--numa-bind",
    "all processes run on this machine, without Ray": "--distributed-executor-backend N=mp",
    "each GPU's process loads its own part of the weights": "--max-parallel-loading-workers N",
    "the tokenizer is always loaded; prompts can also be token ids": "--skip-tokenizer-init",
    "code in a model's repository is never run": "--trust-remote-code, --code-revision N",
    "the engine uses its own implementation of the model": "--model-impl N=auto",
    "models take text only": "--limit-mm-per-prompt N, --mm-processor-kwargs N, --mm-processor-cache-gb N",
    "xgrammar is the only backend of structured outputs": (
        "--structured-outputs-config N=auto|xgrammar, --guided-decoding-backend N=auto|xgrammar"
    ),
    "requests can set disable_any_whitespace in structured_outputs": "--guided-decoding-disable-any-whitespace",
    "--reasoning-parser alone enables reasoning": "--enable-reasoning",
    "the prompt always has the tools of the request": "--exclude-tools-when-tool-choice-none",
    "the role of responses is always assistant": "--response-role N=assistant",
    "tokens are streamed as soon as they are generated": "--stream-interval N=1",
    "templates get a message's content as a string": "--chat-template-content-format N=auto|string",
    "statistics are never logged; they are at /metrics": "--disable-log-stats",
    "always on; --disable-log-requests turns it off": "--enable-log-requests",
    "prompts are never logged": "--max-log-len N",
    "always on; /load shows the load": "--enable-server-load-tracking",
    "--otlp-traces-endpoint alone sends the times of each request": "--collect-detailed-traces N+",
    "/docs is always served; it describes the API only": "--disable-fastapi-docs",
    "--h11-max-incomplete-event-size limits the size of a header instead": "--h11-max-header-count N",
    "always on": "--enable-request-id-headers, --enable-prompt-tokens-details, --enable-tokenizer-info-endpoint",
}
"""Usages of accepted flags. The keys are the reasons why they have no effect. A usage is the flag's names, then ``N``
for one value or ``N+`` for several, then ``=`` and the values that are accepted without a note."""

REFUSED = {
    "one PEFT adapter can be merged into the weights at load: --adapter DIR": (
        "--enable-lora, --lora-modules N+, --max-loras N, --max-lora-rank N, --fully-sharded-loras"
    ),
    "use --tensor-parallel-size N to split the model": "--pipeline-parallel-size -pp N=1",
    "--data-parallel-size N starts all engines on this machine; on several: shadowkv ray serve --replicas N": (
        "--data-parallel-size-local -dpl N=1, --data-parallel-backend -dpb N=mp, --data-parallel-rank -dpn N, "
        "--data-parallel-start-rank -dpr N, --data-parallel-address -dpa N, --data-parallel-rpc-port -dpp N, "
        "--data-parallel-hybrid-lb -dph, --data-parallel-external-lb -dpe"
    ),
    "heads are split across GPUs, tokens are not; --data-parallel-size N uses more GPUs": (
        "--decode-context-parallel-size -dcp N=1"
    ),
    "--enable-expert-parallel gives each GPU whole experts, which stay there": "--enable-eplb, --enable-dbo",
    "an engine uses the GPUs of one machine; replicas can run on several: shadowkv ray serve --replicas N": (
        "--nnodes -n N=1, --node-rank -r N=0, --master-addr N=127.0.0.1, --headless"
    ),
    "weights stay on the GPU; --quantization fp8 makes them smaller": "--cpu-offload-gb N=0",
    "set a fraction of the GPU's memory: --gpu-memory-utilization SHARE": "--kv-cache-memory-bytes N",
    "use --kv-offload-gib GIB, which keeps cached prompts in host memory": "--kv-offloading-size N",
    "caches are transferred as files: use --kv-disk-dir DIR and --role": "--kv-transfer-config N",
    "no events are sent; statistics of the cache are at /metrics": "--kv-events-config N",
    "set their number in the policy: --kv turboquant-4:skip_layers=2": "--kv-cache-dtype-skip-layers N+",
    """use --hf-overrides '{"rope_scaling": {...}}'""": "--rope-scaling N",
    "layers keep their window; --max-model-len with the window's size has the same effect": "--disable-sliding-window",
    "use --hf-overrides JSON to replace entries of the model's config.json": "--hf-config-path N",
    "MODEL must be a Hugging Face model or a .gguf file": "--config-format N=auto|hf",
    "--load-format has no further settings": "--model-loader-extra-config N",
    "only needed files are downloaded; MODEL can be a directory with some of the files": (
        "--ignore-patterns N+=original/**/*"
    ),
    "the tokenizer is the model's tokenizer.json, or that of --tokenizer": "--tokenizer-mode N=auto|hf",
    "--revision holds for the model and its tokenizer": "--tokenizer-revision N",
    "set HF_TOKEN in the environment; every user of the machine can read a command line": "--hf-token N",
    "the server only generates text, it makes no embeddings": (
        "--runner N=auto|generate, --task N=auto|generate, --convert N=auto|none"
    ),
    "a prompt is a text or token ids": "--enable-prompt-embeds",
    "models take text only; leave it out": "--allowed-local-media-path N=",
    "use raw_logprobs, which are those before temperature and penalties": "--logprobs-mode N=raw_logprobs",
    "the server runs no code of its users; a request can set logit_bias and penalties": "--logits-processors N+",
    "the server runs no code of its users": "--middleware N",
    "the server runs no code of its users; --tool-call-parser lists the supported formats": "--tool-parser-plugin N",
    "the ciphers are Python's defaults; for others, let a proxy end TLS": "--ssl-ciphers N",
    "restart the server to load a new certificate, or let a proxy end TLS": "--enable-ssl-refresh",
    "the log goes to stderr; --uvicorn-log-level LEVEL sets its level": "--log-config-file N",
    "weights and cache stay on the GPU": "--enable-sleep-mode",
}
"""Usages of refused flags. The keys are the reasons, which name an alternative if there is one."""

ONLY_SERVED = {
    "use a server: shadowkv serve --data-parallel-size N, or shadowkv ray serve --replicas N": (
        f"{DATA_PARALLEL_SIZE} -dp N=1"
    ),
}
"""Usages of flags that ``shadowkv serve`` has and that are refused elsewhere, with reasons as in ``REFUSED``."""

FLAGS = tuple(
    VllmFlag.of(usage, reason, table is not NO_EFFECT)
    for table in (NO_EFFECT, REFUSED, ONLY_SERVED)
    for reason, usages in table.items()
    for usage in usages.split(", ")
)

KEYWORDS = frozenset(flag.dest.removeprefix(PREFIX) for flag in FLAGS)
"""Names of these flags as keywords of ``LLM``."""


def add_vllm_flags(parser: argparse.ArgumentParser, *own: str) -> None:
    """Adds these flags to a parser, hidden from ``--help``, without the flags ``own``, which the command supports.
    ``vllm_notes`` checks the parsed values."""
    for flag in FLAGS:
        if flag.names[0] in own:
            continue
        values: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if flag.values:  # a value can be a JSON object, also in vLLM's dotted form
            values = {"nargs": flag.values, "metavar": "JSON"}
        parser.add_argument(*flag.names, dest=flag.dest, default=None, help=argparse.SUPPRESS, **values)


def vllm_keywords(options: Mapping[str, Any]) -> argparse.Namespace:
    """Converts keywords of ``LLM`` to parsed arguments for ``vllm_notes``. Keywords that are not in ``FLAGS`` are left
    out."""
    given = {}
    for flag in FLAGS:
        value = options.get(flag.dest.removeprefix(PREFIX))
        if value is not None and flag.values:
            value = [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
        given[flag.dest] = value
    return argparse.Namespace(**given)


def vllm_notes(args: argparse.Namespace) -> Iterator[str]:
    """Yields a note for each given flag that has no effect. Raises ValueError if refused flags are given."""
    refused = []
    for flag in FLAGS:
        given = getattr(args, flag.dest, None)
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
