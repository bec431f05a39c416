"""On a GPU, with a real model: what comes back from host memory and from disk answers as what never left the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_cuda_smollm2 import CACHED
from test_smollm2 import filler
from tiers import assert_all_returned, settle

from shadowkv import LLM, SamplingParams
from shadowkv.engine.config import DEFAULT_MODEL
from shadowkv.engine.results import RequestOutput

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not CACHED, reason=f"{DEFAULT_MODEL} is not in the cache; make serve fetches it"),
]
LONG, SHORT = 9000, 200
NEAR = 0.5
"""What another shape of the batch may change log-probabilities by: four steps of bfloat16 between logits of 16 and
32."""


def opened(kv: str, **options: object) -> LLM:
    settings = {"kv_dense_below": 0, "device": "cuda", "max_num_seqs": 3, "max_model_len": 12288, **options}
    return LLM(DEFAULT_MODEL, kv=kv, rope_theta=1e6, **settings)


def forget_device(llm: LLM) -> None:
    settle(llm.engine)
    assert_all_returned(llm.engine)


@pytest.mark.parametrize("kv", ["full", "turbo", "turbo-host", "shadowkv"])
def test_every_tier_answers_alike(tmp_path: Path, kv: str) -> None:
    options = {"kv_offload_gib": 2.0, "kv_disk_dir": str(tmp_path)}
    llm = opened(kv, **options)
    document = filler(llm, LONG, seed=1)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=5)
    once = SamplingParams(max_tokens=1, temperature=0.0)
    question = document + filler(llm, SHORT, seed=3)
    llm.generate([document], once)
    settle(llm.engine)

    def asked() -> RequestOutput:
        (answer,) = llm.generate([question], params)
        assert answer.num_cached_tokens >= LONG - 128
        return answer

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
    assert_alike(answers[1], answers[2])
    assert_alike(answers[0], answers[1])
    forget_device(llm)
    llm.engine.close()


def assert_alike(first: RequestOutput, second: RequestOutput) -> None:
    """The same tokens, up to one at which two were nearly as likely. The ends of restores decide which steps run
    together, and sums depend on the shape of the batch."""
    (one,), (other,) = first.outputs, second.outputs
    assert len(one.token_ids) == len(other.token_ids)
    for place, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
        here, there = one.logprobs[place], other.logprobs[place]
        told = {token: (here[token].logprob, there[token].logprob) for token in (a, b) if token in here.keys() & there}
        print(f"token {place}: {a} and {b}, log-probabilities {told}")
        assert told.keys() == {a, b}
        assert all(abs(x - y) <= NEAR for x, y in told.values())
        if a != b:
            assert told[a][0] - told[b][0] <= NEAR
            assert told[b][1] - told[a][1] <= NEAR
            return


@pytest.mark.parametrize("kv", ["full", "turbo"])
def test_many_restores_at_once_leave_nothing_behind(kv: str) -> None:
    """Restores, copies and decode steps beside one another; answers that begin after as many tokens are alike.

    The first questions are computed after 3,968 tokens, the next ones find their own first page, too.
    """
    llm = opened(kv, kv_offload_gib=2.0)
    documents = [filler(llm, 4000, seed=seed) for seed in (1, 2, 3)]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=5)
    llm.generate([document + filler(llm, 100, seed=9) for document in documents], params)
    forget_device(llm)
    found = []
    for _ in range(3):
        answers = llm.generate([document + filler(llm, 90, seed=8) for document in documents], params)
        assert all(answer.num_cached_tokens >= 3968 for answer in answers)
        found.append(answers)
        forget_device(llm)
    for first, second, third in zip(*found, strict=True):
        assert second.num_cached_tokens == third.num_cached_tokens
        assert_alike(second, third)
        assert first.num_cached_tokens <= second.num_cached_tokens
        if first.num_cached_tokens == second.num_cached_tokens:
            assert_alike(first, second)
