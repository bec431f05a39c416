"""How close a policy's next-token distributions are to full attention's, along full attention's own continuation.

``python -m shadowkv.eval fidelity --text FILE --kv shadowkv quest``: each policy is forced along the tokens that
``full`` generates greedily after a prompt cut from the text, through the engine's own runner and cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from shadowkv.engine.config import DTYPES, EngineConfig
from shadowkv.engine.loading import load_from_config
from shadowkv.eval.session import Session
from shadowkv.kvcache.presets import POLICY_HELP, preset


@dataclass(frozen=True)
class Fidelity:
    """Comparison of logits with those of full attention, over a number of steps.

    Attributes:
        mean_kl, max_kl: KL(full || policy) in nats per token.
        top1_agreement: share of steps at which both rank the same token first.
        steps: tokens compared.
    """

    mean_kl: float
    max_kl: float
    top1_agreement: float
    steps: int


def compare(reference: Tensor, logits: Tensor) -> Fidelity:
    """Fidelity of ``logits`` to ``reference``, both [n, V]."""
    wanted, got = reference.log_softmax(-1), logits.log_softmax(-1)
    kl = (wanted.exp() * (wanted - got)).sum(-1)
    agree = (wanted.argmax(-1) == got.argmax(-1)).float().mean()
    return Fidelity(float(kl.mean()), float(kl.max()), float(agree), len(kl))


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser("python -m shadowkv.eval fidelity", description=__doc__)
    parser.add_argument("--text", required=True, help="text file the prompt is cut from")
    parser.add_argument("--kv", nargs="+", metavar="POLICY", default=["shadowkv", "quest"], help=f"of {POLICY_HELP}")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(arguments)
    capacity = args.prompt_tokens + args.new_tokens
    try:
        specs = [preset(name) for name in args.kv]
        loaded = load_from_config(EngineConfig(args.model, dtype=args.dtype, device=args.device))
        with open(args.text, encoding="utf-8") as file:
            prompt = loaded.tokenizer.encode(file.read())[: args.prompt_tokens]
        if len(prompt) < args.prompt_tokens:
            raise ValueError(f"{args.text} has {len(prompt)} tokens, --prompt-tokens asks for {args.prompt_tokens}")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bar = tqdm(total=args.new_tokens * (1 + len(args.kv)), unit="token")
    tokens, reference = [], []
    for token, logits in Session(loaded, preset("full"), capacity).greedy(prompt, args.new_tokens):
        tokens.append(token)
        reference.append(logits)
        bar.update()
    for name, spec in zip(args.kv, specs, strict=True):
        session = Session(loaded, spec, capacity)
        found = compare(torch.stack(reference), session.force(prompt, tokens))
        bar.update(args.new_tokens)
        row = {"kv": name, **asdict(found), **session.figures(), "spec": asdict(session.cache.spec)}
        bar.write(json.dumps(row))
    bar.close()
    return 0
