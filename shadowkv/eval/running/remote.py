"""Answers samples greedily with an OpenAI-compatible completions endpoint, and loads the tokenizer that counts the
tokens of prompts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

from shadowkv.eval.metrics.scoring import score
from shadowkv.eval.records.policies import Policy
from shadowkv.eval.records.predictions import Prediction, Sample
from shadowkv.installation import adding
from shadowkv.models.gguf.config import config_from_gguf
from shadowkv.models.gguf.file import GGUFFile
from shadowkv.models.gguf.tokenizer import tokenizer_from_gguf
from shadowkv.models.sources import resolve
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.models.tokenization.tokenizer_files import tokenizer_from_directory
from shadowkv.wording import counted


def load_tokenizer(source: str) -> Tokenizer:
    """Returns the tokenizer of a model, given as a catalogue name, directory, .gguf file or hub id. The model need not
    be one that this package can run.

    Raises OSError or ValueError as ``load_model`` does.
    """
    path = resolve(source, weights=True)
    if path.suffix == ".gguf":
        file = GGUFFile(path)
        return tokenizer_from_gguf(file, config_from_gguf(file).eos_token_ids)
    return tokenizer_from_directory(path)


class Remote:
    """A server that answers samples.

    Args:
        base_url: as for the openai client, e.g. ``http://localhost:8000/v1``.
        model: the name under which the server has the model; None means the server's first model.
        count_tokens: counts the tokens of a text with the model's tokenizer.
        concurrency: maximum number of concurrent requests.

    Raises ValueError if the openai client is not installed, the server cannot be reached, or it does not have the
    model.
    """

    def __init__(self, base_url: str, model: str | None, count_tokens: Callable[[str], int], concurrency: int) -> None:
        try:
            import openai
        except ImportError as error:
            raise ValueError(f"--base-url needs the openai client: {adding('eval')}") from error
        self.failures = openai.OpenAIError
        self.count_tokens, self.concurrency = count_tokens, concurrency
        self.client = openai.OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY") or "none", timeout=None)
        try:
            served = {card.id: card for card in self.client.models.list()}
        except openai.OpenAIError as error:
            raise ValueError(f"--base-url {base_url} does not answer: {error}") from error
        if not served or (model is not None and model not in served):
            raise ValueError(f"the server has no model {model!r}; it has {', '.join(served) or 'none'}")
        self.model = model or next(iter(served))
        # vLLM and this project's server report this limit; for other servers it is None.
        self.max_model_len: int | None = getattr(served[self.model], "max_model_len", None)

    def answers(self, work: Sequence[tuple[Sample, list[Policy]]]) -> Iterator[Prediction]:
        """Yields predictions as they arrive. Raises ValueError for a sample that the server refuses, or that is longer
        than the server's ``max_model_len``."""
        with ThreadPoolExecutor(self.concurrency) as threads:
            futures: list[Future[Prediction]] = [
                threads.submit(self._answer, sample, policy) for sample, policies in work for policy in policies
            ]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def _answer(self, sample: Sample, policy: Policy) -> Prediction:
        start, text, answers = time.perf_counter(), "", list[str]()
        counts: list[int | None] = []
        for turn in sample.turns:
            text += turn
            self._check(sample, text)
            try:
                reply = self.client.completions.create(
                    model=self.model, prompt=text, max_tokens=sample.max_new_tokens, temperature=0.0
                )
            except self.failures as error:
                raise ValueError(f"sample {sample.id} of {sample.task}: {error}") from error
            answers.append(reply.choices[0].text)
            text += answers[-1]
            counts.append(reply.usage.completion_tokens if reply.usage else None)
        known = [count for count in counts if count is not None]
        return Prediction(
            task=sample.task,
            id=sample.id,
            length=sample.length,
            policy=policy.label,
            kv=policy.kv,
            budget=policy.budget(sample.length),
            predictions=answers,
            score=score(sample, answers),
            seconds=round(time.perf_counter() - start, 4),
            output_tokens=sum(known) if len(known) == len(counts) else None,
        )

    def _check(self, sample: Sample, text: str) -> None:
        need = self.count_tokens(text) + sample.max_new_tokens
        if self.max_model_len is not None and need > self.max_model_len:
            raise ValueError(
                f"sample {sample.id} of {sample.task} needs {counted(need, 'token')}, the server takes "
                f"at most {self.max_model_len}"
            )
