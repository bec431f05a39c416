"""The sweep fills an engine with as many sequences as it is told, or says how many fit."""

from __future__ import annotations

import pytest
from throughput_sweep import fill
from tiny_model import ENGINE, tiny_model

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine


@pytest.mark.parametrize("room", [1, 2])
def test_a_batch_is_begun_as_a_whole_or_refused(room):
    with tiny_model() as path:
        engine = Engine(EngineConfig(model=str(path), max_num_seqs=4, max_model_len=1024, max_cached_seqs=0, **ENGINE))
    pool = engine.cache.pool
    engine.cache.store.device.allocate(pool.free.device - room * pool.demand(640, 660).device)
    if room < 2:
        with pytest.raises(MemoryError, match="only 1 of 2 sequences fit"):
            fill(engine, 2, 640, 20)
    else:
        assert fill(engine, 2, 640, 20) > 0
        assert len(engine.scheduler.running) == 2
        assert len(engine.step()) == 2
