"""How long it takes to restore what is cached and to compute it anew, by what it has taken: whichever takes less is
done."""

from __future__ import annotations

from shadowkv.kvcache.spec import PAGE

NEW = 0.3
"""Weight of the last measurement."""

LONG = 1024
"""New tokens of prompts from which on speed is told by them: fewer take as long as launching what they need."""


class Rate:
    """Seconds a unit, of late; a guess until something has been measured."""

    def __init__(self, guess: float) -> None:
        self.seconds, self.measured = guess, False

    def add(self, units: int, seconds: float) -> None:
        """Takes a measurement into account."""
        if units:
            new = seconds / units
            self.seconds = self.seconds + NEW * (new - self.seconds) if self.measured else new
            self.measured = True


class Speeds:
    """Of computing prompts, and of the ways from host memory and from disk."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Guesses again."""
        self._prefill = Rate(1e-3)
        self._host, self._disk = Rate(1 / 20e9), Rate(1 / 1e9)

    def computed(self, tokens: int, seconds: float) -> None:
        """Prompts that were computed together. Short ones count until there is a long one: their tokens seem to take
        longer than they do, but a guess may be further off. Less than a page is what is left of a prompt that was
        cached, and tells nothing."""
        if tokens >= LONG:
            self._prefill.add(tokens, seconds)
        elif tokens >= PAGE and not self._prefill.measured:
            self._prefill.seconds = seconds / tokens

    def computing_seconds(self, tokens: int) -> float:
        """Of computing tokens of a prompt."""
        return tokens * self._prefill.seconds

    def host(self, nbytes: int, seconds: float) -> None:
        """Bytes that came from host memory."""
        self._host.add(nbytes, seconds)

    def disk(self, nbytes: int, seconds: float) -> None:
        """Bytes that came from the disk."""
        self._disk.add(nbytes, seconds)

    def host_seconds(self, nbytes: int) -> float:
        """From host memory."""
        return nbytes * self._host.seconds

    def disk_seconds(self, nbytes: int) -> float:
        """From the disk to host memory."""
        return nbytes * self._disk.seconds
