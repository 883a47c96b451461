"""Text of tokens as they come; a character of several tokens comes when it is whole."""

from __future__ import annotations

from collections.abc import Sequence

from pier_node.data.tokens import Tokenizer

BROKEN = "\ufffd"
"""What a decoder shows for bytes that are no character, or not yet."""
LONGEST = 4
"""Tokens that one character may take: UTF-8 has at most four bytes to one."""


class Spelling:
    """Spells the tokens that follow those in `before`.

    Some tokenizers write a token differently at the start of a text than in it, so each piece is decoded behind the one
    before and that one's text is taken away.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._before, self._now = list(before)[-LONGEST:], list[int]()

    def push(self, id: int) -> str:
        """The text that is known with one token more; may be empty."""
        self._now.append(id)
        piece = self._piece(self._now)
        if not piece.endswith(BROKEN):
            self._before, self._now = self._now, []
            return piece
        if len(self._now) < LONGEST:
            return ""
        piece = self._piece(self._now[:1])  # whatever follows, the first of them is no part of a character
        self._before, self._now = self._now[:1], self._now[1:]
        return piece

    def end(self) -> str:
        """What is left when no token comes any more: a character that is not whole."""
        return self._piece(self._now)

    def _piece(self, now: list[int]) -> str:
        return self._tokenizer.decode(self._before + now)[len(self._tokenizer.decode(self._before)) :]
