"""What the engine's process and those of grammars say to one another (``grammar_pool.py``, ``grammar_process.py``)."""

from __future__ import annotations

from dataclasses import dataclass

COMPILED, REFUSED, MASK = b"C", b"R", b"M"
"""First byte of an answer. Behind it: the grammar's bytes of memory, in text; why the compiler refuses it; the tokens
that may come next, a bit for each."""

OUT_OF_MEMORY = 75
"""Exit code of a process that would need more memory than it may have."""


@dataclass(frozen=True)
class Compile:
    """The first message to a process: its grammar, and what it may take.

    Attributes:
        rules: a JSON schema or other rules (``grammar_text``).
        niceness: by how much the priority of compiling it is lower than the engine's.
        seconds: of the processor, to compile it.
        match_seconds: of the processor, to accept tokens of an answer and find the next ones.
        memory: bytes beyond what the process begins with.
    """

    rules: str
    one_line: bool
    niceness: int
    seconds: float
    match_seconds: float
    memory: int


@dataclass(frozen=True)
class Match:
    """Asks which tokens may come next in an answer, behind more ``tokens`` of it; the first time its number is new.

    Attributes:
        answer: its number; None if only ended ones are told.
        ended: numbers of answers that have ended.
    """

    answer: int | None
    tokens: list[int]
    ended: list[int]
