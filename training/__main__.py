"""``python -m training texts | chats | adapter | test | compress``: what samples are made of, the base's chats, an
adapter, its divergence from the base, its file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from shadowkv.wording import counted
from training.chats import read_chats, write_chats
from training.loop import Recipe, Training, held_out, held_out_divergence
from training.model import Lora, compress, load_base
from training.samples import tokenizer_of
from training.texts import read_texts, write_texts

LENGTHS = "4096:0.07,8192:0.16,16384:0.23,32768:0.32,65536:0.22"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = commands.add_parser("texts", help="prose and word lists from Debian's packages (needs apt-get and dpkg)")
    texts.add_argument("--out", type=Path, required=True, metavar="DIR")
    packed = commands.add_parser("compress", help="an adapter in int8, half of bfloat16's bytes")
    packed.add_argument("source", type=Path, metavar="DIR")
    packed.add_argument("--out", type=Path, required=True, metavar="DIR")
    chats = commands.add_parser("chats", help="questions from templates, answered by the base")
    chats.add_argument("--out", type=Path, required=True, metavar="FILE")
    chats.add_argument("--count", type=int, default=16_000, help="to learn from")
    chats.add_argument("--held-out", type=int, default=200, help="to test with")
    chats.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    adapter = commands.add_parser("adapter", help="train; the same command goes on where it stopped")
    adapter.add_argument("--out", type=Path, required=True, metavar="DIR")
    adapter.add_argument("--minutes", type=_minutes, required=True, help="of training, all runs together")
    adapter.add_argument("--initial", type=Path, metavar="DIR", help="adapter to begin with")
    adapter.add_argument("--chats", type=Path, metavar="FILE", help="distil these of the base, too")
    adapter.add_argument("--rate", type=float, default=6e-4, help="peak of the learning rate")
    adapter.add_argument("--lengths", type=_shares, default=LENGTHS, help="of retrieval samples: tokens:share of time")
    adapter.add_argument("--mixed", action="store_true", help="lengths in turns, not as phases in their order")
    adapter.add_argument("--batch-tokens", type=int, default=65_536, help="of a batch of retrieval samples")
    adapter.add_argument("--batches", type=int, default=1, help="of retrieval samples in a step")
    adapter.add_argument("--theta", type=float, default=4e6, help="of RoPE")
    adapter.add_argument("--chat-tokens", type=int, default=32_768, help="of a batch of chats")
    adapter.add_argument("--chat-batches", type=int, default=2, help="of chats in a step")
    adapter.add_argument("--chat-weight", type=float, default=2.0, help="of their divergence, beside retrieval's 1")
    adapter.add_argument("--test-minutes", type=float, default=2.0, help="between tests on held-out chats")
    adapter.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    test = commands.add_parser("test", help="the divergence of an adapter from the base on held-out chats")
    test.add_argument("--adapter", type=Path, required=True, metavar="DIR")
    test.add_argument("--chats", type=Path, required=True, metavar="FILE")
    test.add_argument("--theta", type=float, default=4e6, help="of RoPE with the adapter")
    for command in (chats, adapter, test):
        command.add_argument("--model", default="smollm2-135m-instruct", help="the base, by its catalogue name")
    for command in (chats, adapter):
        command.add_argument("--texts", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    if args.command == "texts":
        write_texts(args.out)
    elif args.command == "compress":
        compress(args.source, args.out)
    elif args.command == "chats":
        write_chats(args.model, read_texts(args.texts), args.out, args.count, args.held_out, args.max_tokens)
    elif args.command == "test":
        _test(args)
    else:
        _train(args)


def _test(args: argparse.Namespace) -> None:
    base = load_base(args.model, _device())
    lora = Lora(base)
    lora.load(args.adapter)
    chats = held_out(read_chats(args.chats), tokenizer_of(args.model))
    if not chats:
        raise SystemExit(f"error: {args.chats} has no held-out chats")
    found = held_out_divergence(base, lora, (base.config.rope.theta, args.theta), chats)
    print(f"{counted(len(chats), 'chat')}:", " ".join(f"{name} {value:.4g}" for name, value in found.items()))


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _train(args: argparse.Namespace) -> None:
    recipe = Recipe(
        model=args.model, texts=args.texts, out=args.out, minutes=args.minutes, rate=args.rate, lengths=args.lengths,
        phased=not args.mixed, tokens=args.batch_tokens, batches=args.batches, theta=args.theta,
        chat_tokens=args.chat_tokens, chat_batches=args.chat_batches, chat_weight=args.chat_weight,
        test_minutes=args.test_minutes, workers=args.workers,
    )  # fmt: skip
    base = load_base(args.model, _device())
    Training(recipe, base, args.initial, read_chats(args.chats) if args.chats else []).run()


def _minutes(text: str) -> float:
    if not (minutes := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0; to test an adapter: python -m training test")
    return minutes


def _shares(text: str) -> dict[int, float]:
    try:
        return {int(length): float(share) for length, share in (pair.split(":") for pair in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 4096:0.5,8192:0.5") from None


if __name__ == "__main__":
    main()
