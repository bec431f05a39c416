"""How close a policy's next-token distributions are to full attention's, along full attention's own continuation.

``python -m shadowkv.eval.fidelity --text FILE --kv shadowkv quest``: each policy is forced along the tokens that
``full`` generates greedily after a prompt cut from the text, through the engine's own runner and cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from shadowkv.engine.config import DTYPES, EngineConfig
from shadowkv.engine.loading import load_from_config
from shadowkv.engine.runner import Runner
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.layout import Blocks, Layout
from shadowkv.kvcache.parts import build_parts
from shadowkv.kvcache.presets import PRESETS, preset
from shadowkv.kvcache.sequence import Sequence as CachedSequence
from shadowkv.kvcache.spec import KVSpec
from shadowkv.models.loader import LoadedModel


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


class Session:
    """One sequence of one policy, driven token by token on a cache of its own size.

    Args:
        loaded: the model.
        spec: the policy.
        capacity: tokens the sequence may reach.
    """

    def __init__(self, loaded: LoadedModel, spec: KVSpec, capacity: int) -> None:
        shape, parameter = loaded.config.shape, next(loaded.model.parameters())
        spec = spec.resolve(shape)
        layout = Layout(spec, shape, parameter.dtype, build_parts(spec, shape, parameter.dtype))
        need = layout.blocks(layout.pages(1, capacity))
        self.cache = KVCache(
            spec,
            shape,
            loaded.config.rope,
            slots=1,
            max_model_len=capacity,
            memory=Blocks(need.device, need.host),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        self.runner = Runner(loaded.model, self.cache)
        self.sequence: CachedSequence | None = None
        self.capacity = capacity

    def feed(self, tokens: list[int], forks: Sequence[Session] = ()) -> Tensor:
        """Prefills the next turn's ``tokens``; returns logits [V] after the last.

        ``forks`` are new sessions of other policies that take the same first turn from this one's computation.
        """
        for session in (self, *forks):
            if session.sequence is None:
                session.sequence = session.cache.pool.allocate(len(tokens), session.capacity)
            else:
                length = int(session.cache.pool.table.length[session.sequence.slot])
                session.cache.pool.extend(session.sequence, length + len(tokens), session.capacity)
        assert self.sequence is not None
        copies = [(fork.cache, [fork.sequence]) for fork in forks if fork.sequence is not None]
        run = self.runner.prefill([(self.sequence, tokens)], copies)
        with torch.inference_mode():
            while True:
                try:
                    next(run)
                except StopIteration as end:
                    return end.value[0][0]

    def step(self, token: int) -> Tensor:
        """Decodes one token; returns logits [V] of the next."""
        assert self.sequence is not None, "feed a prompt first"
        return self.runner.decode([self.sequence], [token])[0]

    def figures(self) -> dict[str, float | int]:
        """Tokens that the last step attended to, and the smallest share of the keys' energy that a layer kept."""
        assert self.sequence is not None, "feed a prompt first"
        length = int(self.cache.pool.table.length[self.sequence.slot])
        figures: dict[str, float | int] = {"attended_tokens": self.cache.spec.attended_tokens(length)}
        kept = self.cache.kept_energy(self.sequence)
        return figures if kept is None else {**figures, "least_kept_energy": round(float(kept.min()), 4)}

    def force(self, prompt: list[int], tokens: list[int]) -> Tensor:
        """Logits [len(tokens), V] that predict each of ``tokens`` after ``prompt``."""
        return torch.stack([self.feed(prompt), *(self.step(token) for token in tokens[:-1])])

    def greedy(self, prompt: list[int], count: int) -> Iterator[tuple[int, Tensor]]:
        """Greedy continuation: ``count`` tokens, each with the logits [V] that chose it."""
        logits = self.feed(prompt)
        for left in range(count - 1, -1, -1):
            token = int(logits.argmax())
            yield token, logits
            if left:
                logits = self.step(token)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser("python -m shadowkv.eval.fidelity", description=__doc__)
    parser.add_argument("--text", required=True, help="text file the prompt is cut from")
    parser.add_argument("--kv", nargs="+", choices=tuple(PRESETS), default=["shadowkv", "quest"])
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(arguments)
    capacity = args.prompt_tokens + args.new_tokens
    try:
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
    for name in args.kv:
        session = Session(loaded, preset(name), capacity)
        found = compare(torch.stack(reference), session.force(prompt, tokens))
        bar.update(args.new_tokens)
        row = {"kv": name, **asdict(found), **session.figures(), "spec": asdict(session.cache.spec)}
        bar.write(json.dumps(row))
    bar.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
