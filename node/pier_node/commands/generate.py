"""`pier-node generate`: lets a model continue a prompt, and shows the text as it is generated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pier_node.rounds.weights import find_weights, pick_device
from pier_node.trainer.data.tokens import BROKEN, Spelling, Tokenizer
from pier_node.trainer.model.decoder import stream


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
    """Show the prompt and its continuation; see trainer/model/generate.py for the arguments. Raises PierError."""
    weights = find_weights(data, model)
    tokenizer = weights.open_tokenizer()
    ids = [int(id) for id in tokenizer.encode(prompt)]
    made = stream(weights.model(pick_device(device)), ids, tokens, temperature, top_k, seed)
    for piece in itertools.chain([prompt], pieces(tokenizer, ids, made)):
        show(printable(piece))


def pieces(tokenizer: Tokenizer, before: list[int], ids: Iterable[int]) -> Iterator[str]:
    """Text of the tokens that follow those in `before`, as it is generated; see trainer/data/tokens.py."""
    spelling = Spelling(tokenizer, before)
    for id in ids:
        if piece := spelling.push(id):
            yield piece
    yield spelling.end()


def printable(text: str) -> str:
    """Text that can only print letters on a terminal: a model may generate any control character."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else BROKEN for letter in text)
