"""What recurrent states in bfloat16 cost a hybrid, against float32: KL per token, on a small model with random weights

Both engines decode the same random tokens, one by one, so that every step rounds a state. Some heads forget a token at
once, others after up to 10,000 tokens. Logits have a standard deviation of 3. The result need not hold for trained
weights.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.nn import functional as F

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.startup.loading import load_engine_parts

MODEL = {
    "model_type": "qwen3_5_text",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rms_norm_eps": 1e-6,
}
LOGITS, LONGEST = 3.0, 1e4
"""Standard deviation of the logits, and the number of tokens after which the slowest head forgets."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line for each range of positions; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384, help="to decode (default: %(default)s)")
    parser.add_argument("--ranges", type=int, default=4, help="of as many positions each (default: %(default)s)")
    args = parser.parse_args(argv)
    divergences = measure(args.tokens)
    for number, part in enumerate(divergences.chunk(args.ranges)):
        start = number * len(part)
        print(f"tokens {start} to {start + len(part)}: KL {part.mean():.2e}, at most {part.max():.2e}", flush=True)
    return 0


@torch.no_grad()
def measure(tokens: int) -> torch.Tensor:
    """Returns KL(float32 || bfloat16), float32 [tokens], of the distributions after each token with states of the two
    dtypes."""
    ids = random.Random(0).choices(range(MODEL["vocab_size"]), k=tokens)
    logits = []
    with TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps({**MODEL, "max_position_embeddings": tokens}))
        for dtype in ("float32", "bfloat16"):
            settings = {"load_format": "dummy", "dtype": "float32", "max_num_seqs": 1, "mamba_ssm_cache_dtype": dtype}
            config = EngineConfig(model=directory, kv="full", device="cpu", enable_prefix_caching=False, **settings)
            loaded, cache, _ = load_engine_parts(config)
            for layer in loaded.model.layers:
                if layer.linear_attention is not None:
                    rates = torch.linspace(0.0, -math.log(LONGEST), len(layer.linear_attention.log_rate))
                    layer.linear_attention.log_rate.copy_(rates)
            assert loaded.model.head is not None
            loaded.model.head.mul_(LOGITS)
            runner, sequence = Runner(loaded.model, cache), cache.allocate(0, tokens)
            logits.append(torch.cat([runner.decode([sequence], [token]).float() for token in ids]))
    exact, rounded = (F.log_softmax(one, dim=-1) for one in logits)
    return (exact.exp() * (exact - rounded)).sum(-1)


if __name__ == "__main__":
    sys.exit(main())
