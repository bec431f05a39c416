"""Bytes of the files that a prompt's segments are transferred as, by policy: a prompt of random tokens, on two layers

The keys and values have Llama-3.1-8B's shape (8 kv heads of 128 dimensions). The weights are random; the number of
bytes does not depend on them. All layers have the same number of bytes, so a model with 32 layers has 16 times as many.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from robustness.tiny_model import tiny_model
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.sampling_params import SamplingParams

SHAPE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line for each policy; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", nargs="+", default=["full", "turbo"], metavar="POLICY", help="the first is 1")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt (default: %(default)s)")
    args = parser.parse_args(argv)
    first = 0
    with tiny_model(**SHAPE, max_position_embeddings=args.tokens + 64, rope_scaling=None) as model:
        for policy in args.policies:
            nbytes, tokens = measure(model, policy, args.tokens)
            first = first or nbytes
            print(f"{policy}: {nbytes} bytes of {tokens} tokens, {first / nbytes:.2f} times fewer", flush=True)
    return 0


def measure(model: Path, policy: str, length: int) -> tuple[int, int]:
    """Returns the bytes of a prompt's files, and the number of the prompt's tokens that they hold."""
    prompt = random.Random(0).choices(range(1, 128), k=length)
    with TemporaryDirectory() as directory:
        settings = {"load_format": "dummy", "device": "cpu", "dtype": "bfloat16", "max_num_seqs": 1, "role": "prefill"}
        config = EngineConfig(model=str(model), kv=policy, kv_dense_below=0, kv_disk_dir=directory, **settings)
        engine = Engine(config)
        engine.add_request("prompt", prompt, SamplingParams(max_tokens=1))
        while engine.has_work or engine.settling:
            engine.step()
        engine.close()
        files = list(Path(directory).glob("*.safetensors"))
        tokens = max(segment.first + segment.tokens for segment in engine.scheduler.prefix_cache.segments(64)[0])
        return sum(file.stat().st_size for file in files), tokens


if __name__ == "__main__":
    sys.exit(main())
