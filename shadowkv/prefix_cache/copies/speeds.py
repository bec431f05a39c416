"""How long restoring and recomputing take, estimated from earlier measurements: whichever is faster is done."""

from __future__ import annotations

from shadowkv.kvcache.policy.spec import PAGE

NEW = 0.3
"""Weight of the last measurement."""

LONG = 1024
"""New tokens from which on prompts are long enough to measure speed: fewer take as long as their launches."""


class Rate:
    """Recent seconds per unit; a guess until something has been measured."""

    def __init__(self, guess: float) -> None:
        self.seconds, self.measured = guess, False

    def add(self, units: int, seconds: float) -> None:
        """Takes a measurement into account."""
        if units:
            new = seconds / units
            self.seconds = self.seconds + NEW * (new - self.seconds) if self.measured else new
            self.measured = True


class Speeds:
    """Speeds of computing prompts, and of transfers from host memory and from disk."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Returns to the initial guesses."""
        self._prefill = Rate(1e-3)
        self._host, self._disk = Rate(1 / 20e9), Rate(1 / 1e9)

    def computed(self, tokens: int, seconds: float) -> None:
        """Records prompts that were computed together. Short ones count until there is a long one: they overestimate
        the time per token, but a guess may be further off. Less than a page is what remains of a cached prompt, and
        says nothing about speed."""
        if tokens >= LONG:
            self._prefill.add(tokens, seconds)
        elif tokens >= PAGE and not self._prefill.measured:
            self._prefill.seconds = seconds / tokens

    def computing_seconds(self, tokens: int) -> float:
        """Time to compute ``tokens`` tokens of a prompt."""
        return tokens * self._prefill.seconds

    def host(self, nbytes: int, seconds: float) -> None:
        """Records bytes that came from host memory."""
        self._host.add(nbytes, seconds)

    def disk(self, nbytes: int, seconds: float) -> None:
        """Records bytes that came from the disk."""
        self._disk.add(nbytes, seconds)

    def host_seconds(self, nbytes: int) -> float:
        """Time to copy ``nbytes`` from host memory."""
        return nbytes * self._host.seconds

    def disk_seconds(self, nbytes: int) -> float:
        """Time to read ``nbytes`` from the disk into host memory."""
        return nbytes * self._disk.seconds
