"""What may be told of a text that is being made: all but an end that could become one of its stop sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Token:
    """A token of an answer, or of its prompt.

    Attributes:
        text: what it adds to the text; "" for the first bytes of a character, which comes with its last one.
        log_prob: that the mixture gave it; None for the first one of a prompt, which nothing predicts.
        top: the likeliest tokens at its place, text: log p; None where they were not asked for.
        parts: how much of its probability came from whom, expert: part, with sum 1; empty where nothing predicted it.
    """

    text: str
    log_prob: float | None = None
    top: dict[str, float] | None = None
    parts: dict[str, float] = field(default_factory=dict)


class Telling:
    """Lets tokens through as soon as no stop sequence can begin in them.

    Attributes:
        stopped: a stop sequence has come. It is not told, nor what follows it.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stopped = False
        self._stops = stops
        self._held: list[Token] = []

    def push(self, token: Token) -> list[Token]:
        """One token more; returns those that may be told now."""
        self._held.append(token)
        text = "".join(held.text for held in self._held)
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._cut(min(found))
        return self._release(len(text) - self._open_end(text))

    def end(self) -> list[Token]:
        """No token comes any more: the rest."""
        held, self._held = self._held, []
        return held

    def _open_end(self, text: str) -> int:
        """Characters at the end that a stop sequence begins with."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _release(self, safe: int) -> list[Token]:
        told, length = 0, 0
        for held in self._held:
            length += len(held.text)
            if length > safe:
                break
            told += 1
        released, self._held = self._held[:told], self._held[told:]
        return released

    def _cut(self, end: int) -> list[Token]:
        told: list[Token] = []
        for held in self.end():
            if end <= 0:
                break
            told.append(replace(held, text=held.text[:end]))
            end -= len(held.text)
        return told
