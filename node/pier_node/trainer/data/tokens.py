"""Text to token ids and back: raw bytes, or any tokenizer.json of the `tokenizers` library.

Spelling decodes a stream of tokens; a character of several tokens appears once it is complete.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pier_node.base.errors import PierError
from pier_node.config.run import DataSection

log = logging.getLogger(__name__)

Tokens = npt.NDArray[np.unsignedinteger[Any]]

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
"""Names of the token after a document in well-known tokenizers; a tokenizer.json does not say which one it is."""


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
        vocab_size: one more than the largest id.
        separator: the id between two documents, if there is one.
        fingerprint: equal for tokenizers that give equal ids.
    """

    vocab_size: int
    separator: int | None
    fingerprint: str

    def encode(self, text: str) -> Tokens:
        """The ids of a text, shape [tokens]."""

    def encode_batch(self, texts: list[str]) -> list[Tokens]:
        """The ids of each text."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids."""


class ByteTokenizer:
    """Ids are UTF-8 bytes; a newline separates documents."""

    vocab_size = 256
    separator: int | None = ord("\n")
    fingerprint = "bytes"

    def encode(self, text: str) -> Tokens:
        """The bytes of a text, uint8 [bytes]."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_batch(self, texts: list[str]) -> list[Tokens]:
        """The bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some bytes; invalid UTF-8 and ids that are not bytes become U+FFFD."""
        return bytes(id if id < 256 else 0xFF for id in ids).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Library

        try:
            content = path.read_bytes()
            text = content.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise PierError(
                f"data.tokenizer = {path}: {error}",
                'Give a tokenizer.json, or "bytes". To join a run, copy its founder\'s file to this path.',
            ) from error
        try:
            self._library = Library.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise PierError(f"data.tokenizer = {path}: not a tokenizer.json: {error}") from error
        # transformers saves those of its last call, which would cut and fill up the texts of a run.
        self._library.no_truncation()
        self._library.no_padding()
        ids = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        self.separator = next((ids[name] for name in END_OF_TEXT if name in ids), None)
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> Tokens:
        """The ids of a text, uint32 [tokens], without special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[Tokens]:
        """The ids of each text, computed on all cores."""
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; special tokens and unknown ids are left out."""
        return str(self._library.decode([int(id) for id in ids]))


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that [data] names: `bytes`, or the path of a tokenizer.json. Raises PierError: it is neither."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(Path(name).expanduser())


def check_vocab(tokens: int, vocab_size: int, pretrained: bool = False) -> None:
    """Raise PierError if a model of `vocab_size` has no room for a tokenizer's `tokens`.

    Args:
        pretrained: somebody else has made both. Some tokenizers have tokens that their model lacks, for other uses, so
            this is only logged; text in which one occurs ends the training (corpus.py, `Windows`).
    """
    if tokens <= vocab_size:
        return
    if pretrained:
        log.warning("the tokenizer has %d tokens, the model %d: text must not contain the others", tokens, vocab_size)
        return
    raise PierError(
        f"model.vocab_size = {vocab_size}: the tokenizer has {tokens} tokens; allowed: {tokens} or more",
        f"Set vocab_size = {tokens} in [model], or choose another [data] tokenizer.",
    )


def document_separator(config: DataSection) -> int | None:
    """The token between documents that do not see each other; None: they do. Raises PierError: there is none."""
    if not config.document_mask:
        return None
    separator = open_tokenizer(config.tokenizer).separator
    if separator is None:
        raise PierError(
            f"data.document_mask = true: {config.tokenizer} has no token that separates documents",
            f"Leave document_mask out, or give a tokenizer with one of {', '.join(END_OF_TEXT)}.",
        )
    return separator


BROKEN = "\ufffd"
"""What a decoder shows for bytes that are not a character, or not yet."""
LONGEST = 4
"""Maximum tokens per character: UTF-8 uses at most four bytes."""


class Spelling:
    """Decodes the tokens that follow those in `before`.

    Some tokenizers write a token differently at the start of a text. So each piece is decoded together with the
    previous one, whose text is then removed.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._before, self._now = list(before)[-LONGEST:], list[int]()

    def push(self, id: int) -> str:
        """The text that is known after one more token; may be empty."""
        self._now.append(id)
        piece = self._piece(self._now)
        if not piece.endswith(BROKEN):
            self._before, self._now = self._now, []
            return piece
        if len(self._now) < LONGEST:
            return ""
        # No character is that long: the first tokens are broken, as many as do not change what follows.
        cuts = (self._piece(self._now[:cut]) + self._tokenizer.decode(self._now[cut:]) for cut in range(1, LONGEST))
        cut = next((cut for cut, cutting in enumerate(cuts, 1) if cutting == piece), 1)
        piece = self._piece(self._now[:cut])
        self._before, self._now = self._now[:cut], self._now[cut:]
        return piece

    def end(self) -> str:
        """The remaining text at the end: an incomplete character."""
        return self._piece(self._now)

    def _piece(self, now: list[int]) -> str:
        return self._tokenizer.decode(self._before + now)[len(self._tokenizer.decode(self._before)) :]


def pieces(tokenizer: Tokenizer, before: Sequence[int], ids: Iterable[int]) -> Iterator[str]:
    """Text of the tokens that follow those in `before`, as it is generated."""
    spelling = Spelling(tokenizer, before)
    for id in ids:
        if piece := spelling.push(id):
            yield piece
    yield spelling.end()
