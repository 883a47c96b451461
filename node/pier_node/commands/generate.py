"""`pier-node generate`: lets a model go on from a prompt, and shows the text as it comes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pier_node.commands.weights import find_weights, pick_device
from pier_node.data.tokens import Tokenizer
from pier_node.model.generate import stream

BROKEN = "\ufffd"
"""What a decoder shows for bytes that are no character, or not yet."""
LONGEST = 4
"""Tokens that one character may take: UTF-8 has at most four bytes to one."""


def generate(
    data: Path,
    model: Path | None,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    device: str,
    show: Callable[[str], None],
) -> None:
    """Show the prompt and what follows it; see model/generate.py for the arguments. Raises PierError."""
    weights = find_weights(data, model)
    tokenizer = weights.open_tokenizer()
    ids = [int(id) for id in tokenizer.encode(prompt)]
    made = stream(weights.model(pick_device(device)), ids, tokens, temperature, top_k, seed)
    for piece in itertools.chain([prompt], pieces(tokenizer, ids[-LONGEST:], made)):
        show(printable(piece))


def pieces(tokenizer: Tokenizer, before: list[int], ids: Iterable[int]) -> Iterator[str]:
    """Text of the tokens that follow those in `before`, as they come; a character of several comes when it is whole.

    Some tokenizers write a token differently at the start of a text than in it, so each piece is decoded behind the one
    before and that one's text is taken away.
    """
    now: list[int] = []
    for id in ids:
        now.append(id)
        piece = _piece(tokenizer, before, now)
        if not piece.endswith(BROKEN):
            yield piece
            before, now = now, []
        elif len(now) == LONGEST:  # whatever follows, the first of them is no part of a character
            yield _piece(tokenizer, before, now[:1])
            before, now = now[:1], now[1:]
    yield _piece(tokenizer, before, now)


def _piece(tokenizer: Tokenizer, before: list[int], now: list[int]) -> str:
    return tokenizer.decode(before + now)[len(tokenizer.decode(before)) :]


def printable(text: str) -> str:
    """Text that does nothing to a terminal but show letters: a model may make any control character."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else BROKEN for letter in text)
