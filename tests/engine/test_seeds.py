"""What a seed promises of answers that attend to sampled tokens: on a tiny model whose heads `turbo` takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_engine import drain, prompt, tokens
from tiers import evict_device
from torch import Tensor

from shadowkv import SamplingParams
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.outputs import TokenOutput
from shadowkv.engine.sampling_params import choice_seed

SEEDED = SamplingParams(max_tokens=30, temperature=1.0, seed=11, ignore_eos=True, logprobs=0)


class Recorded(Engine):
    """An engine that notes what its steps select, and the seeds of their rows: on a CPU, where no step is a graph."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            EngineConfig(
                model=str(directory), load_format="dummy", kv="turbo:budget=128", kv_dense_below=0, max_num_seqs=4,
                max_cached_seqs=2, device="cpu",
            )
        )  # fmt: skip
        self.selected: list[Tensor] = []
        self.seeds: list[Tensor] = []
        self.cache.selection_hook = self._see

    def _see(self, layer: int, q: Tensor, batch: Any, selected: Any) -> Any:
        self.selected.append(selected.chunks)
        self.seeds.append(batch.sampling.seeds)
        return selected

    def answer(self, name: str, wanted: list[int], params: SamplingParams) -> list[TokenOutput]:
        """Of the newest of all requests; what is noted is of this answer alone."""
        self.selected, self.seeds = [], []
        self.add_request(name, wanted, params)
        return drain(self)[name]


@pytest.fixture
def engine(tiny: Path, tmp_path: Path) -> Recorded:
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 16}))
    return Recorded(tmp_path)


def logprobs(outputs: list[TokenOutput]) -> list[float]:
    return [one.logprob for output in outputs for one in output.logprobs or []]


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(a.equal(b) for a, b in zip(one, other))


def test_a_seed_repeats_between_hits_and_on_a_fresh_engine(engine: Recorded) -> None:
    wanted = prompt(5, 1500)
    fresh = engine.answer("fresh", wanted, SEEDED)
    assert engine.selected and fresh[-1].cached_tokens == 0
    selected = engine.selected
    evict_device(engine)
    again = engine.answer("again", wanted, SEEDED)
    assert (tokens(again), logprobs(again)) == (tokens(fresh), logprobs(fresh)) and alike(selected, engine.selected)

    hit = engine.answer("hit", wanted, SEEDED)
    assert hit[-1].cached_tokens > 0
    selected, seeds = engine.selected, engine.seeds
    other = engine.answer("other", wanted, replace(SEEDED, seed=12))  # the sequence has had another seed since
    assert other[-1].cached_tokens > 0 and tokens(other) != tokens(hit)
    assert not any(one.equal(two) for one, two in zip(seeds, engine.seeds, strict=True))
    second = engine.answer("second", wanted, SEEDED)
    assert second[-1].cached_tokens == hit[-1].cached_tokens
    assert (tokens(second), logprobs(second)) == (tokens(hit), logprobs(hit))
    assert alike(seeds, engine.seeds) and alike(selected, engine.selected)


def test_random_numbers_are_the_same_in_any_company(engine: Recorded) -> None:
    """Answers are as like as products of matrices, which sum in another order where a batch is wider: a chunk that is
    on the edge of what is selected may be another. Other random numbers change most logprobs by over 0.3."""
    wanted = prompt(6, 1200)
    alone = engine.answer("alone", wanted, SEEDED)
    seeds = [int(one[-1]) for one in engine.seeds]
    evict_device(engine)
    for number in range(3):
        engine.add_request(f"other {number}", prompt(number, 1300), replace(SEEDED, seed=number, max_tokens=40))
    beside = engine.answer("beside", wanted, SEEDED)
    assert max(map(len, engine.seeds)) == 4
    assert seeds == [int(one[3]) for one in engine.seeds if len(one) > 3]
    assert logprobs(beside) == pytest.approx(logprobs(alone), abs=0.03)  # of the same tokens


def test_choices_of_a_prompt_have_samples_of_their_own(engine: Recorded) -> None:
    wanted = prompt(7, 900)
    for choice in range(3):
        params = replace(SEEDED, seed=choice_seed(11, choice), temperature=0.0)
        engine.add_request(str(choice), wanted, params)
    answers = drain(engine)
    assert len(answers) == 3
    for seeds, chunks in zip(engine.seeds, engine.selected, strict=True):
        assert len(seeds.unique()) == len(seeds)
        assert not any(chunks[0].equal(other) for other in chunks[1:])


def test_greedy_answers_repeat_without_a_seed_and_others_do_not(engine: Recorded) -> None:
    wanted = prompt(8, 900)

    def seeds(temperature: float) -> list[list[int]]:
        params, made = SamplingParams(max_tokens=4, temperature=temperature, ignore_eos=True), []
        for name in "ab":
            engine.answer(name, wanted, params)
            made.append([int(one) for one in engine.seeds])
            evict_device(engine)
        return made

    first, second = seeds(0.0)
    assert first == second
    first, second = seeds(1.0)
    assert not {*first} & {*second}
