"""On a GPU, with a real model: what comes back from host memory and from disk answers as what never left the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_cuda_smollm2 import CACHED
from test_smollm2 import filler

from shadowkv import LLM, SamplingParams
from shadowkv.engine.config import DEFAULT_MODEL

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not CACHED, reason=f"{DEFAULT_MODEL} is not in the cache; make serve fetches it"),
]
LONG, SHORT = 9000, 200


def opened(kv: str, **options: object) -> LLM:
    settings = {"kv_dense_below": 0, "device": "cuda", "max_num_seqs": 3, "max_model_len": 12288, **options}
    return LLM(DEFAULT_MODEL, kv=kv, rope_theta=1e6, **settings)


def settle(llm: LLM) -> None:
    while llm.engine.settling:
        llm.engine.step()


def forget_device(llm: LLM) -> None:
    settle(llm)
    while llm.engine.scheduler.prefix_cache.evict():
        pass
    assert llm.engine.cache.free == llm.engine.cache.total


@pytest.mark.parametrize("kv", ["full", "turbo", "turbo-host", "shadowkv"])
def test_every_tier_answers_alike(tmp_path: Path, kv: str) -> None:
    options = {"kv_offload_gib": 2.0, "kv_disk_dir": str(tmp_path)}
    llm = opened(kv, **options)
    document = filler(llm, LONG, seed=1)
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True, logprobs=0)
    once = SamplingParams(max_tokens=1, temperature=0.0)
    question = document + filler(llm, SHORT, seed=3)
    llm.generate([document], once)
    settle(llm)

    def asked() -> list[tuple[int, float]]:
        (answer,) = llm.generate([question], params)
        assert answer.num_cached_tokens >= LONG - 128
        return [(one.token_id, one.logprob) for one in answer.logprobs]

    forget_device(llm)
    answers = [asked()]  # from host memory
    forget_device(llm)
    # The question's own pages are there now, too; without them it is computed as the first time.
    assert llm.engine.stats().prefixes["host"].restores >= 1
    llm.engine.close()
    llm = opened(kv, **options)
    answers.append(asked())  # from disk, with all that the question left there
    forget_device(llm)
    answers.append(asked())
    assert answers[1] == answers[2]
    assert answers[0][0][0] == answers[1][0][0]
    forget_device(llm)
    llm.engine.close()


@pytest.mark.parametrize("kv", ["full", "turbo"])
def test_many_restores_at_once_leave_nothing_behind(kv: str) -> None:
    """Restores, copies and decode steps beside one another; answers that begin after as many tokens are the same.

    The first questions are computed after 3,968 tokens, the next ones find their own first page, too.
    """
    llm = opened(kv, kv_offload_gib=2.0)
    documents = [filler(llm, 4000, seed=seed) for seed in (1, 2, 3)]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    llm.generate([document + filler(llm, 100, seed=9) for document in documents], params)
    forget_device(llm)
    found = []
    for _ in range(3):
        answers = llm.generate([document + filler(llm, 90, seed=8) for document in documents], params)
        assert all(answer.num_cached_tokens >= 3968 for answer in answers)
        found.append([(answer.num_cached_tokens, answer.outputs[0].token_ids) for answer in answers])
        forget_device(llm)
    assert found[1] == found[2]
    for first, second in zip(*found[:2], strict=True):
        assert first == second or first[0] < second[0]
