"""``shadowkv plan``: memory, largest batch and shortest step time of cache policies, without weights or a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from shadowkv.command_line import Parser, one_line
from shadowkv.engine.config import DEFAULT_POLICY, EngineConfig, add_policies, check_states
from shadowkv.kvcache.policy.spec import FETCH_BUFFER
from shadowkv.kvcache.traffic import HIT_RATE
from shadowkv.load_settings import parse_count
from shadowkv.plan.cards import CARDS, parse_card
from shadowkv.settings import POSITIVE, add_flag

DOES_NOT_FIT = 1
"""Exit code if there is a policy with which not even one sequence fits."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan. Returns the exit code."""
    args = _parse(argv)
    try:
        text, missing = _run(args)
        print(text)
        for line in missing:
            print(f"does not fit: {line}", file=sys.stderr)
        return DOES_NOT_FIT if missing else 0
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {one_line(error, max_model_len='--context')}", file=sys.stderr)
        return 2


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="shadowkv plan", description=__doc__)
    add = parser.add_argument
    add_flag(parser, EngineConfig, "model")
    text = "length of every sequence, prompt and output together"
    add("--context", type=parse_count, required=True, metavar="TOKENS", help=text)
    text = "data type of weights and activations; auto is bfloat16"
    add_flag(parser, EngineConfig, "dtype", help=text)
    for name in ("quantization", "hf_overrides", "speculative_config"):
        add_flag(parser, EngineConfig, name)
    add("--json", action="store_true", help="print unrounded figures as JSON")
    kv = parser.add_argument_group("KV cache")
    add_policies(kv, DEFAULT_POLICY)
    text = "share of selected chunks whose values the fetch buffer already has (default: %(default)s)"
    kv.add_argument("--hit-rate", type=float, default=HIT_RATE, metavar="SHARE", help=text)
    text = "size of the fetch buffer, as a multiple of what one decode step selects"
    add_flag(kv, EngineConfig, "fetch_buffer", default=FETCH_BUFFER, help=text)
    text = "number of checkpoints of recurrent states to reserve memory for (default: one for each sequence)"
    add_flag(kv, EngineConfig, "max_mamba_checkpoints", help=text)
    add_flag(kv, EngineConfig, "mamba_ssm_cache_dtype")
    many = parser.add_argument_group("more than one GPU")
    text = "number of GPUs to split the model across; figures are those of the first GPU"
    add_flag(many, EngineConfig, "tensor_parallel_size", "--gpus", help=text)
    add_flag(many, EngineConfig, "enable_expert_parallel")
    text = "number of replicas, each on its own GPUs (default: %(default)s)"
    many.add_argument("--replicas", "--data-parallel-size", "-dp", type=int, default=1, metavar="N", help=text)
    machine = parser.add_argument_group("machine")
    text = "GPU model; bandwidths are measured for h200, and from data sheets for others (default: %(default)s)"
    machine.add_argument("--gpu", type=parse_card, metavar="|".join(CARDS), default="h200", help=text)
    for flag, unit, text in (
        ("--gpu-memory-gib", "GIB", "device memory (default: that of --gpu)"),
        ("--device-bandwidth-tbs", "TB/S", "read bandwidth of device memory (default: that of --gpu)"),
        ("--host-bandwidth-gbs", "GB/S", "bandwidth at which the GPU reads host memory (default: that of --gpu)"),
    ):
        machine.add_argument(flag, type=float, metavar=unit, help=text)
    text = "fraction of the device memory to use, weights included"
    add_flag(machine, EngineConfig, "gpu_memory_utilization", default=0.9, help=text)
    text = "pinned host memory for values of policies that keep them on the host (default: what the batch needs)"
    add_flag(machine, EngineConfig, "host_memory_gib", help=text)
    text = "additional pinned host memory for copies of cached prompts (default: 0)"
    add_flag(machine, EngineConfig, "kv_offload_gib", help=text)
    args = parser.parse_args(argv)
    card = CARDS[args.gpu]
    for name, value in (
        ("gpu_memory_gib", card.memory_gib),
        ("device_bandwidth_tbs", card.device_bandwidth_tbs),
        ("host_bandwidth_gbs", card.host_bandwidth_gbs),
    ):
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    return args


def _run(args: argparse.Namespace) -> tuple[str, list[str]]:
    """Returns the plan, and a line for each policy with which not even one sequence fits."""
    engine = _checked(args)  # finds simple errors before PyTorch is imported

    import torch

    from shadowkv.kvcache.recurrent.layout import StateSettings
    from shadowkv.models.loader import load_plan
    from shadowkv.models.sharding import Shard
    from shadowkv.plan.planner import Machine, Planner
    from shadowkv.plan.report import as_json, as_text, missing

    config, forms = load_plan(
        args.model, args.context, args.hf_overrides, args.quantization, draft_head=engine.drafts_with_head
    )
    machine = Machine(
        args.gpu_memory_gib,
        args.gpu_memory_utilization,
        args.host_memory_gib,
        args.device_bandwidth_tbs,
        args.host_bandwidth_gbs,
        args.kv_offload_gib,
    )
    dtype = torch.bfloat16 if args.dtype == "auto" else getattr(torch, args.dtype)
    shard = Shard(config, 0, args.tensor_parallel_size, args.enable_expert_parallel)
    checkpoints, state_dtype = args.max_mamba_checkpoints, args.mamba_ssm_cache_dtype
    check_states(config.shape, max_mamba_checkpoints=checkpoints, mamba_ssm_cache_dtype=state_dtype)
    drafted = min(engine.drafted_states, engine.drafted_tokens)  # of one sequence; the planner multiplies by the batch
    states = StateSettings.of(checkpoints, state_dtype, drafted)
    options = args.hit_rate, args.fetch_buffer, args.replicas, forms, states
    planner = Planner(shard, dtype, args.context, machine, *options)
    drafts = args.speculative_config
    plans = [planner.plan(EngineConfig(kv=name, speculative_config=drafts)) for name in dict.fromkeys(args.kv)]
    if args.json:
        text = json.dumps(as_json(args.model, planner, plans), indent=2)
    else:
        text = as_text(args.model, planner, plans)
    return text, missing(planner, plans)


def _checked(args: argparse.Namespace) -> EngineConfig:
    """Returns an engine's config, made from the flags that are settings of an engine. Raises ValueError for invalid
    flags."""
    checked = (
        *("gpu_memory_utilization", "host_memory_gib", "kv_offload_gib", "fetch_buffer", "tensor_parallel_size"),
        *("max_mamba_checkpoints", "speculative_config"),
    )
    config = EngineConfig(**{name: getattr(args, name) for name in checked})
    bad = [
        f"--{name.replace('_', '-')} {getattr(args, name)} {POSITIVE.rule}"
        for name in ("context", "gpu_memory_gib", "device_bandwidth_tbs", "host_bandwidth_gbs", "replicas")
        if not POSITIVE.holds(getattr(args, name))
    ]
    if not 0 <= args.hit_rate <= 1:
        bad.append(f"--hit-rate {args.hit_rate} must be in [0, 1]")
    if bad:
        raise ValueError("; ".join(bad))
    return config


if __name__ == "__main__":
    sys.exit(main())
