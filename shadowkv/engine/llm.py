"""Offline use from Python: ``LLM(model).generate(prompts)``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType
from typing import Any

from tqdm import tqdm

from shadowkv.engine.answer_text import AnswerText
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine, interrupts_deferred
from shadowkv.engine.outputs import RequestOutput, TokenLogprobs, TokenSelections
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.warmup import warm_up


@dataclass
class Completion:
    """One prompt's answer."""

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    selections: list[TokenSelections | None] = field(default_factory=list)

    def add(self, output: RequestOutput) -> None:
        """Adds what came next."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.selections += output.selections or []
        self.finish_reason, self.cached_tokens = output.finish_reason, output.cached_tokens
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs


class LLM:
    """A model that continues prompts in batches.

    Args:
        model: name, Hugging Face directory or hub id, or ``.gguf`` file.
        options: any field of ``EngineConfig``, for example ``kv="shadowkv"``.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = Engine(EngineConfig(model=model, **options))
        warm_up(self.engine)
        self.tokenizer = self.engine.tokenizer
        self._numbers = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Writes what is on its way to the disk tier; call it last where there is one."""
        with interrupts_deferred():
            self.engine.close()

    def generate(
        self,
        prompts: Iterable[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Answers to ``prompts`` (texts or token ids), in order; ``params`` for all of them, or one each. Without any,
        they are sampled as the model's generation_config.json says (``generation_config``), as in vLLM.

        ``use_tqdm`` shows a bar on stderr, with tokens per second.

        Raises RequestError, before anything runs, for a prompt that could never be served, and RuntimeError for one
        that failed on the way. Ctrl-C ends them all between two steps; the engine can be used again.
        """
        ids = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams(**self.engine.sampling_defaults)] * len(ids)
        requests = [
            self.engine.request(f"prompt-{next(self._numbers)}", tokens, request_params)
            for tokens, request_params in zip(ids, params, strict=True)
        ]
        answers = {request.request_id: Completion(request.prompt_token_ids) for request in requests}
        texts = {request.request_id: AnswerText(self.tokenizer, request.params) for request in requests}
        with interrupts_deferred() as interruptible:
            try:
                for request in requests:
                    self.engine.add(request)
                self._run(answers, texts, use_tqdm, interruptible)
            except BaseException:
                for name in answers:
                    self.engine.abort(name)
                raise
        return list(answers.values())

    def chat(
        self, messages: list[dict[str, str]], params: SamplingParams | None = None, use_tqdm: bool = True
    ) -> Completion:
        """The answer to one conversation, through the model's chat template."""
        prompt = self.tokenizer.encode(self.tokenizer.apply_chat_template(messages), add_special_tokens=False)
        return self.generate([prompt], params, use_tqdm)[0]

    def _run(
        self,
        answers: dict[str, Completion],
        texts: dict[str, AnswerText],
        use_tqdm: bool,
        interruptible: Callable[[], None],
    ) -> None:
        tokens, began = 0, monotonic()
        with tqdm(total=len(answers), unit="prompt", disable=not use_tqdm) as bar:
            while self.engine.has_work:
                interruptible()
                for step in self.engine.step():
                    output = texts[step.request_id].read([step])
                    if output.error is not None:
                        raise RuntimeError(f"{output.request_id}: {output.error}")
                    answers[output.request_id].add(output)
                    tokens += len(output.token_ids)
                    if output.finish_reason is not None:
                        self.engine.stop(output.request_id)  # at a stop string
                        bar.set_postfix_str(f"{tokens / (monotonic() - began):.1f} tokens/s", refresh=False)
                        bar.update()
