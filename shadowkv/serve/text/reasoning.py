"""Separates a model's reasoning from its answer: text within ``<think>`` and ``</think>``."""

from __future__ import annotations

from typing import ClassVar

from shadowkv.serve.text.text_reader import Reading, TextReader

BEGIN, END = "<think>", "</think>"

TAGGED = ("deepseek_r1", "qwen3", "glm45", "glm47", "minimax_m2")
"""Values of vLLM's ``--reasoning-parser`` for models with these tags."""


class ReasoningParser(TextReader):
    """Reads one answer. If the reasoning does not end, the whole answer is reasoning. White space beside the tags is
    dropped.

    Args:
        prompt: the end of the prompt. Some chat templates put the tags ``begin`` or ``end`` there.

    Attributes:
        begin, end: tags around the reasoning.
    """

    begin: ClassVar[str] = BEGIN
    end: ClassVar[str] = END

    def __init__(self, prompt: str) -> None:
        super().__init__()
        self._is_open = prompt.rstrip().endswith(self.begin)
        self._is_closed = prompt.endswith(self.end)
        self._thought: list[str] = []
        self._answer = self._output

    @property
    def is_thinking(self) -> bool:
        """Whether the latest text is reasoning."""
        return self._output is self._thought

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """Takes more generated text. Returns the further reasoning and the further text that are certain by now."""
        self._go_on(text, last)
        thought, answer = "".join(self._thought), "".join(self._answer)
        self._thought.clear()
        self._answer.clear()
        return thought, answer

    def _read(self) -> Reading[None]:
        yield from self._blanks()
        if (yield from self._passed(self.begin)) or self._is_open:
            self._drop()
            self._output = self._thought
            yield from self._until(self.end)
            self._output = self._answer
            yield from self._passed(self.end)
            self._drop()
        elif self._is_closed:
            self._drop()
        yield from self._rest()
