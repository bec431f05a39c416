"""RULER's samples as the prompts of a timed batch, so that speed and answers are of one run."""

from __future__ import annotations

from itertools import islice

from shadowkv.engine.engine import Engine
from shadowkv.eval.metrics.scoring import score
from shadowkv.eval.records.predictions import Sample
from shadowkv.eval.suites import ruler
from shadowkv.models.loader import LoadedModel


def ruler_samples(loaded: LoadedModel, length: int, count: int, seed: int) -> list[Sample]:
    """Returns ``count`` samples of at most ``length`` tokens, all tasks in turn."""
    each = -(-count // len(ruler.TASKS))
    by_task = [ruler.samples(task, loaded.tokenizer, length, each, seed) for task in ruler.TASKS]
    return [sample for of_all_tasks in zip(*by_task, strict=True) for sample in of_all_tasks][:count]


def tokens_of(loaded: LoadedModel, sample: Sample) -> list[int]:
    """Returns the tokens of a sample's prompt."""
    return loaded.tokenizer.encode(sample.turns[0], add_special_tokens=True)


def scores(engine: Engine, loaded: LoadedModel, samples: list[Sample]) -> list[float]:
    """Returns the score of each sample, from 0 to 1. The engine runs a request for each, whose id is its number. What a
    request has generated after the end of its answer, or beyond the sample's limit, does not count."""
    ends = loaded.tokenizer.eos_token_ids | set(loaded.config.eos_token_ids)
    generated = {one.request.request_id: one.request.output_token_ids for one in engine.scheduler.running}
    found = []
    for number, sample in enumerate(samples):
        answer = list(islice(generated[str(number)], sample.max_new_tokens))
        end = next((place for place, token in enumerate(answer) if token in ends), len(answer))
        found.append(score(sample, [loaded.tokenizer.decode(answer[:end])]))
    return found
