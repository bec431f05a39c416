"""Servers that are killed while they serve: the next one starts on what is there, and answers as if nothing were."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_engine import GREEDY
from test_tiers import ask
from tiers import assert_nothing_left, settle

KILLS = 3

SERVER = """
import json, random, sys

sys.path.append("tests/engine")
from test_engine import GREEDY
from test_tiers_killed import question
from shadowkv.prefix_cache.chains import Chains
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine

Chains.seconds = lambda *_: 0.0  # so small a model computes faster than it restores
engine = Engine(EngineConfig(**json.loads(sys.argv[1])))
rng, asked = random.Random(sys.argv[2]), {}
while True:
    while len(engine.scheduler.waiting) < 4:
        number, name = rng.randrange(30), str(len(asked))
        asked[name] = number, []
        engine.add_request(name, question(number), GREEDY)
    for output in engine.step():
        number, tokens = asked[output.request_id]
        tokens += output.token_ids
        if output.finish_reason is not None:
            from_disk = engine.scheduler.prefix_cache.stats()["disk"].hit_tokens
            print(json.dumps([number, tokens, from_disk, output.error]), flush=True)
"""


def question(number: int) -> list[int]:
    """One of several documents, each with several questions about it."""
    document, tail = random.Random(number // 3), random.Random(1000 + number)
    return [document.randrange(3, 256) for _ in range(640)] + [tail.randrange(3, 256) for _ in range(100)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_that_is_killed_leaves_nothing_bad_behind(make: Any, tiny: Path, tmp_path: Path, ranks: int) -> None:
    options = {"kv": "full", "kv_disk_dir": str(tmp_path), "max_num_seqs": 4, "max_cached_seqs": 2, "kv_dense_below": 0}
    options["tensor_parallel_size"] = ranks
    arguments = json.dumps({"model": str(tiny), "load_format": "dummy", "fetch_buffer": 2.0, **options})
    answers, found, rng = dict[int, list[int]](), 0, random.Random(0)
    for run in range(KILLS):
        command = [sys.executable, "-c", SERVER, arguments, str(run)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            for _ in range(rng.randint(4, 12)):
                number, answer, from_disk, error = json.loads(server.stdout.readline())
                assert error is None
                assert answers.setdefault(number, answer) == answer
                found += from_disk
            time.sleep(rng.random() * 0.05)
            server.kill()
    assert found
    engine = make(kv="full", tensor_parallel_size=ranks)
    for number, answer in answers.items():
        assert ask(engine, question(number), replace(GREEDY, cache_prompt=False))[0] == answer
    engine.close()
    engine = make(**options)
    for number, answer in answers.items():
        assert ask(engine, question(number))[0] == answer
    settle(engine)
    disk = engine.scheduler.prefix_cache.lower.disk.stats()
    assert disk.restores and not disk.corrupt
    assert_nothing_left(engine)
    engine.close()
