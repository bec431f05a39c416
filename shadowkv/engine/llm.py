"""Offline use from Python: ``LLM(model).generate(prompts)``."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from numbers import Integral
from time import monotonic
from typing import Any, TypeAlias

from tqdm import tqdm

from shadowkv.engine.answer_text import AnswerText
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine, interrupts_deferred
from shadowkv.engine.outputs import TextOutput, TokenOutput
from shadowkv.engine.request import Request
from shadowkv.engine.results import CompletionOutput, RequestOutput
from shadowkv.engine.sampling_params import SamplingParams, choice_seed
from shadowkv.engine.vllm_flags import KEYWORDS, vllm_keywords, vllm_notes
from shadowkv.engine.warmup import warm_up
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.wording import counted

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""

PROMPT_KINDS = 'a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'

Messages: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass
class _Choice:
    """An answer in progress. It is number ``index`` of the ``n`` answers to a prompt. ``of`` collects all of them."""

    request: Request
    index: int
    text: AnswerText
    of: RequestOutput


class LLM:
    """A model with an engine in this process, for batches of prompts.

    Args:
        model: name, Hugging Face directory or hub id, or ``.gguf`` file.
        options: any field of ``EngineConfig``, for example ``kv="shadowkv"``. Options of vLLM that have no effect here
            are accepted with a note on stderr, as on the command line.

    Raises TypeError for an unknown option, ValueError for a refused option of vLLM, and what ``Engine`` raises.
    """

    def __init__(self, model: str, **options: Any) -> None:
        own = {name: value for name, value in options.items() if name in EngineConfig.names()}
        if unknown := [name for name in options if name not in own and name not in KEYWORDS]:
            raise TypeError(f"LLM has no option {', '.join(unknown)}; it has {', '.join(EngineConfig.names())}")
        for note in vllm_notes(vllm_keywords(options)):
            print(f"note: {note}", file=sys.stderr, flush=True)
        self.engine = Engine(EngineConfig(model=model, **own))
        warm_up(self.engine)
        self._tokenizer = self.engine.tokenizer
        self._numbers = itertools.count()
        self._arrived: dict[str, deque[TokenOutput]] = {}

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes pending pages to the disk tier and closes the engine. Call it last."""
        with interrupts_deferred():
            self.engine.close()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Generates answers to one prompt or several, and returns them in order.

        Args:
            sampling_params: one for all prompts, or one for each. Without it, the defaults of the model's
                generation_config.json apply (``generation_config``), as in vLLM.
            use_tqdm: whether to show a progress bar on stderr, with tokens per second.
            lora_request: vLLM's parameter, which must be None.

        Before anything runs, it raises TypeError for a wrong type of prompt or parameters, and RequestError for a
        prompt that can never be served. Later it raises RuntimeError for a request that fails. Ctrl-C ends all requests
        between two steps, and the engine can be used again.
        """
        if lora_request is not None:
            raise ValueError("lora_request must be None: one adapter is merged at load, LLM(model, adapter=DIR)")
        choices = self._choices(_prompts(prompts), sampling_params)
        tokens, began = 0, monotonic()
        answers = list({choice.of.request_id: choice.of for choice in choices}.values())
        with (
            interrupts_deferred() as interruptible,
            closing(self._run(choices, interruptible)) as outputs,
            tqdm(total=len(answers), unit="prompt", disable=not use_tqdm) as bar,
        ):
            for choice, output in outputs:
                choice.of.add(choice.index, output, self._tokenizer)
                tokens += len(output.token_ids)
                if choice.of.finished:
                    bar.set_postfix_str(f"{tokens / (monotonic() - began):.1f} tokens/s", refresh=False)
                    bar.update()
        return answers

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Streams the answers of ``generate``. Each output has the new part of one answer, whose ``text`` can be empty,
        as with vLLM's ``RequestOutputKind.DELTA``. Raises what ``generate`` raises. Closing the iterator aborts all
        requests.
        """
        return self._stream(self._choices(_prompts(prompts), sampling_params))

    def _stream(self, choices: list[_Choice]) -> Iterator[RequestOutput]:
        unfinished = {choice.of.request_id: len(choice.of.outputs) for choice in choices}
        outputs = self._run(choices, lambda: None)
        try:
            while True:
                with interrupts_deferred():  # a Ctrl-C takes effect between two outputs
                    following = next(outputs, None)
                if following is None:
                    return
                choice, output = following
                answer = choice.of
                what = answer.request_id, answer.prompt, answer.prompt_token_ids
                piece = RequestOutput(*what, [CompletionOutput(choice.index)])
                piece.add(0, output, self._tokenizer)
                unfinished[answer.request_id] -= piece.finished
                piece.finished = not unfinished[answer.request_id]
                yield piece
        finally:
            with interrupts_deferred():
                outputs.close()

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generates answers to one conversation or several, through the model's chat template.

        The template gets ``tools`` and ``chat_template_kwargs``. A message's content is a text or a list of
        ``{"type": "text", "text": ...}``. With ``continue_final_message`` the answer continues the last message.
        Special tokens in messages are read as plain text.

        Raises TypeError for a value that is no conversation, ValueError if the template refuses a conversation, and
        what ``generate`` raises.
        """
        prompts = [
            self._tokenizer.encode_chat(
                chat,
                add_generation_prompt and not continue_final_message,
                tools=tools,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for chat in _conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def _choices(
        self, prompts: list[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[_Choice]:
        choices = []
        all_params = self._params(len(prompts), sampling_params)
        for number, (prompt, params) in enumerate(zip(prompts, all_params, strict=True)):
            text, tokens = self._read(prompt, f"prompts[{number}]")
            name, several = f"prompt-{next(self._numbers)}", params.n > 1
            answer = RequestOutput(name, text, tokens, [CompletionOutput(index) for index in range(params.n)])
            for index in range(params.n):
                seed = None if params.seed is None else choice_seed(params.seed, index)
                request = self.engine.request(
                    f"{name}-{index}" if several else name, tokens, replace(params, n=1, seed=seed)
                )
                choices.append(_Choice(request, index, AnswerText(self._tokenizer, request.params), answer))
        return choices

    def _params(self, count: int, given: SamplingParams | Sequence[SamplingParams] | None) -> Sequence[SamplingParams]:
        if given is None:
            given = SamplingParams(**self.engine.sampling_defaults)
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, Sequence) or not all(isinstance(params, SamplingParams) for params in given):
            raise TypeError(f"sampling_params must be SamplingParams or a list of them, and is {_kind(given)}")
        if len(given) != count:
            raise ValueError(
                f"sampling_params has {len(given)} entries for {counted(count, 'prompt')}: pass one, or one for each"
            )
        return given

    def _read(self, prompt: Prompt, name: str) -> tuple[str | None, list[int]]:
        """Returns a prompt's text and its token ids. The text is None if the prompt was given as token ids. Raises
        TypeError for another type, ValueError for a text with an unpaired surrogate."""
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
                raise TypeError(f"{name} must be {PROMPT_KINDS}, and is an object with {', '.join(map(repr, prompt))}")
            ((key, value),) = prompt.items()
            name, prompt = f"{name}[{key!r}]", value
            if isinstance(prompt, str) != (key == "prompt"):
                wanted = "a text" if key == "prompt" else "token ids"
                raise TypeError(f"{name} must be {wanted}, and is {_kind(prompt)}")
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{name} has an unpaired surrogate at index {error.start}") from error
            return prompt, self._tokenizer.encode(prompt)
        if not isinstance(prompt, Iterable):
            raise TypeError(f"{name} must be {PROMPT_KINDS}, and is {_kind(prompt)}")
        tokens: list[Any] = list(prompt)
        for token in tokens:
            if not isinstance(token, Integral) or isinstance(token, bool):
                raise TypeError(f"{name} must be {PROMPT_KINDS}, and has {_kind(token)} in it")
        return None, [int(token) for token in tokens]  # NumPy integers become plain ones

    def _run(
        self, choices: list[_Choice], interruptible: Callable[[], None]
    ) -> Generator[tuple[_Choice, TextOutput], None, None]:
        """Runs requests to their ends, beside the requests of open streams. Closing the generator aborts the remaining
        requests. ``interruptible`` is called where a Ctrl-C can take effect."""
        left = {choice.request.request_id: choice for choice in choices}
        names = list(left)
        try:
            for name, choice in left.items():
                self._arrived[name] = deque()
                self.engine.add(choice.request)
            while left:
                interruptible()
                if not any(self._arrived[name] for name in left):
                    self._step()
                for name, choice in list(left.items()):
                    while name in left and self._arrived[name]:
                        output = choice.text.read([self._arrived[name].popleft()])
                        if output.error is not None:
                            raise RuntimeError(f"{name}: {output.error}")
                        if output.finish_reason is not None:
                            self.engine.stop(name)  # the engine does not see stop strings
                            del left[name]
                        yield choice, output
        finally:
            for name in names:
                self.engine.abort(name)
                self._arrived.pop(name, None)

    def _step(self) -> None:
        for output in self.engine.step():
            if output.request_id in self._arrived:
                self._arrived[output.request_id].append(output)


def _prompts(prompts: Any) -> list[Prompt]:
    """Returns one prompt or several as a list. Raises TypeError for anything else."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be {PROMPT_KINDS}, or a list of such prompts, and is {_kind(prompts)}")
    several = list(prompts)
    return [several] if several and all(isinstance(token, Integral) for token in several) else several


def _conversations(messages: Any) -> list[Messages]:
    """Returns one conversation or several as a list. Raises TypeError for anything else, ValueError for an empty
    conversation."""
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        chats = [messages] if all(isinstance(turn, Mapping) for turn in messages) else messages
        if all(isinstance(chat, Sequence) and all(isinstance(turn, Mapping) for turn in chat) for chat in chats):
            if not all(chats):
                raise ValueError("messages must not be empty: a conversation needs at least one message")
            return [[_with_text(turn) for turn in chat] for chat in chats]
    wanted = "a list of {'role': …, 'content': …}, or a list of such lists"
    raise TypeError(f"messages must be {wanted}, and is {_kind(messages)}")


def _with_text(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the message with its content as one text, as chat templates read it. Raises TypeError for a part that is
    no text."""
    content = turn.get("content")
    if not isinstance(content, list):
        return turn
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise TypeError(f'a part of a content must be {{"type": "text", "text": a text}}, and is {_kind(part)}')
    return {**turn, "content": "\n".join(part["text"] for part in content)}


def _kind(value: object) -> str:
    return f"{value!r:.80} ({type(value).__name__})"
