"""Messages between the engine's process (``grammar_pool.py``) and the grammar processes (``grammar_process.py``)."""

from __future__ import annotations

from dataclasses import dataclass

COMPILED, REFUSED, MASK = b"C", b"R", b"M"
"""First byte of a reply. COMPILED is followed by the grammar's size in bytes, as text; REFUSED by the compiler's
reason; MASK by the mask of the next token, a bit for each token."""

OUT_OF_MEMORY = 75
"""Exit code of a process that reaches its memory limit."""


@dataclass(frozen=True)
class Compile:
    """The first message to a grammar process: its grammar and its limits.

    Attributes:
        rules: a JSON schema or another grammar (``grammar_text``).
        one_line: as in ``SamplingParams.json_one_line``.
        niceness: niceness of the compilation, relative to the engine's.
        seconds: limit on the processor time of the compilation.
        match_seconds: limit on the processor time of one ``Match``.
        memory: limit on the memory in bytes, beyond that of the new process.
    """

    rules: str
    one_line: bool
    niceness: int
    seconds: float
    match_seconds: float
    memory: int


@dataclass(frozen=True)
class Match:
    """Adds tokens to an answer and asks for its next mask. An unknown number starts a new answer.

    Attributes:
        answer: the answer's number; None if the message only has ``ended``.
        tokens: the answer's new tokens.
        ended: numbers of answers that have ended.
    """

    answer: int | None
    tokens: list[int]
    ended: list[int]
