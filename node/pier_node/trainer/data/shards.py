"""Tokens on disk: shards, the manifest that lists them, and streams that read several shards as one array.

A folder of tokens has `manifest.json` and one .npy file per shard, each a flat array of ids. A shard is complete and on
disk before the manifest names it, so that whoever was killed while writing can continue after the last one. A
fingerprint of each shard detects damage.

Other programs' tokens are files without a manifest: .npy, or .bin, which is nanoGPT's (uint16, nothing else) or, with
its header of 1024 bytes, llm.c's.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from pier_node.base.durable import Torn, read_sealed, replace, seal
from pier_node.base.errors import PierError
from pier_node.base.toml import Section, first_problem
from pier_node.trainer.data.tokens import Tokens

MANIFEST = "manifest.json"

Split = Literal["train", "validation"]

BLOCK = 1 << 16
BLOCKS = 256
"""Number of blocks of BLOCK bytes in a fingerprint: all of a file up to 16 MiB, evenly spaced ones of a larger file."""


def fingerprint(path: Path) -> str:
    """Size and CRC-32 of blocks of a file, in a time that does not grow with the file."""
    size, crc = path.stat().st_size, 0
    spread = (index * (size - BLOCK) // (BLOCKS - 1) for index in range(BLOCKS))
    with path.open("rb") as file:
        for start in spread if size > BLOCK * BLOCKS else range(0, size, BLOCK):
            file.seek(start)
            crc = zlib.crc32(file.read(BLOCK), crc)
    return f"{size}-{crc:08x}"


class TokenShard(Section):
    """A file of tokens."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    tokens: Annotated[int, Field(ge=1)]
    check: str
    """Its fingerprint."""


class TokenManifest(Section):
    """What a folder of tokens has. Shards follow each other in this order."""

    key: str
    """Names all that decides which tokens these are."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    vocab_size: Annotated[int, Field(ge=0)]
    """Upper limit of ids, exclusive."""
    separator: int | None
    """The id between two documents, if there is one."""
    complete: bool = False
    documents: Annotated[int, Field(ge=0)] = 0
    """Documents of the source that have been read, also those of other sites; a resumed run continues behind them."""
    read: Annotated[int, Field(ge=0)] = 0
    """Bytes of UTF-8 text in them."""
    train: tuple[TokenShard, ...] = ()
    validation: tuple[TokenShard, ...] = ()

    @classmethod
    def load(cls, folder: Path) -> Self:
        """That of a folder. Raises Torn: it is missing or damaged."""
        fields = read_sealed(folder / MANIFEST)
        try:
            return cls.model_validate_json(json.dumps(fields))
        except ValidationError as error:
            raise Torn(f"{MANIFEST}: {first_problem(error)}") from error

    def save(self, folder: Path) -> None:
        """Write it to a folder. Raises OSError."""
        replace(folder / MANIFEST, seal(self.model_dump(mode="json")))

    def check(self, folder: Path) -> None:
        """Raise Torn, or OSError, if a shard is not what was written."""
        for shard in (*self.train, *self.validation):
            if fingerprint(folder / shard.name) != shard.check:
                raise Torn(f"{shard.name} does not match its fingerprint")

    def files(self, folder: Path, split: Split) -> list[TokenFile]:
        """The shards of a split, which need not be there."""
        return [TokenFile(folder / shard.name, shard.tokens) for shard in getattr(self, split)]


def smallest(vocab_size: int) -> np.dtype[Any]:
    """The smallest type that holds every id below this."""
    return np.min_scalar_type(max(vocab_size - 1, 0))


class ShardWriter:
    """Appends tokens to new shards in a folder, after those of its manifest."""

    def __init__(self, folder: Path, manifest: TokenManifest) -> None:
        self._folder, self.manifest = folder, manifest
        self._dtype = smallest(manifest.vocab_size)
        self._open: dict[Split, TokenWriter] = {}
        self.pending = 0
        """Tokens that the manifest does not have yet."""

    def append(self, split: Split, tokens: Tokens) -> None:
        """Add tokens to the open shard of a split. Raises OSError."""
        if len(tokens):
            if split not in self._open:
                number = len(getattr(self.manifest, split))
                self._open[split] = TokenWriter(self._folder / f"{split}-{number:05}.npy", self._dtype)
            self._open[split].append(tokens)
            self.pending += len(tokens)

    def commit(self, documents: int, read: int, complete: bool = False) -> None:
        """Close the open shards; return when they and the manifest that names them are on disk. Raises OSError."""
        shards: dict[str, tuple[TokenShard, ...]] = {}
        for split, writer in self._open.items():
            writer.close()
            shard = TokenShard(name=writer.path.name, tokens=writer.length, check=fingerprint(writer.path))
            shards[split] = (*getattr(self.manifest, split), shard)
        update = {"documents": documents, "read": read, "complete": complete, **shards}
        self.manifest = self.manifest.model_copy(update=update)
        self.manifest.save(self._folder)
        self._open, self.pending = {}, 0

    def abandon(self) -> None:
        """Close the open shards, which stay unfinished."""
        for writer in self._open.values():
            writer.abandon()


class TokenWriter:
    """Appends tokens to a new .npy file, which is complete after `close`."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self._file = path, path.open("wb")
        self._dtype = dtype
        self.length = 0
        self._write_header()

    def append(self, tokens: Tokens) -> None:
        """Add ids, each of which must fit the file's dtype."""
        self._file.write(tokens.astype(self._dtype, copy=False).tobytes())
        self.length += len(tokens)

    def close(self) -> None:
        """Write the length into the header, where NumPy reserves 21 digits, and sync the file to disk."""
        self._file.seek(0)
        self._write_header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close the file, which stays unfinished."""
        with suppress(OSError):
            self._file.close()

    def _write_header(self) -> None:
        description = np.lib.format.dtype_to_descr(self._dtype)
        header = {"shape": (self.length,), "fortran_order": False, "descr": description}
        np.lib.format.write_array_header_1_0(self._file, header)


class Stream:
    """Read-only tokens of several arrays, one after the other."""

    def __init__(self, arrays: Iterable[Tokens]) -> None:
        self.arrays: Sequence[Tokens] = [array for array in arrays if len(array)]
        self._ends = np.cumsum([len(array) for array in self.arrays], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.concatenate([*self.arrays, np.array([], np.uint8)], dtype=dtype)

    def windows(self, starts: npt.NDArray[np.integer], length: int) -> npt.NDArray[np.int64]:
        """The `length` tokens from each start, int64 [starts, length]. They must lie within the stream."""
        found = np.empty((len(starts), length), np.int64)
        for row, start in zip(found, starts.tolist()):
            index, filled = int(np.searchsorted(self._ends, start, side="right")), 0
            while filled < length:
                array = self.arrays[index]
                first = start + filled - (int(self._ends[index]) - len(array))
                piece = array[first : first + length - filled]
                row[filled : filled + len(piece)] = piece
                filled, index = filled + len(piece), index + 1
        return found


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens that is, or should be, at `path`."""

    path: Path
    tokens: int

    def open(self) -> Tokens:
        """Map it. Raises PierError: it is missing, or is not what it should be."""
        try:
            array = _map(self.path)
        except (OSError, EOFError, ValueError) as error:
            remedy = "Copy this shard here from where its folder was made: this site trains on it, or validates."
            raise PierError(f"{self.path}: {getattr(error, 'strerror', None) or error}", remedy) from error
        if len(array) != self.tokens:
            problem = f"{self.path} has {len(array)} tokens; its manifest says {self.tokens}"
            raise PierError(problem, "Copy the file again.")
        return array


def opened(files: Sequence[TokenFile], first: int, end: int) -> Stream:
    """Tokens first..end-1 of all files together. Only files that have some of them are opened. Raises PierError."""
    return Stream(_pieces(files, first, end))


def _pieces(files: Sequence[TokenFile], first: int, end: int) -> Iterator[Tokens]:
    begin = 0
    for file in files:
        if begin < end and begin + file.tokens > first:
            yield file.open()[max(first - begin, 0) : end - begin]
        begin += file.tokens


def count(files: Iterable[TokenFile]) -> int:
    """Number of tokens in all of them."""
    return sum(file.tokens for file in files)


LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""By the first two numbers of the header of llm.c's token files, the type of an id: GPT-2's, Llama 3's."""
HEADER = 1024
"""Bytes of that header: 256 numbers of four bytes."""


def _map(path: Path) -> Tokens:
    """Raises OSError, or EOFError or ValueError: these are not tokens."""
    if path.suffix == ".npy":
        array: Any = np.load(path, mmap_mode="r")
        if array.ndim != 1 or array.dtype.kind not in "ui":
            raise ValueError(f"an array of {array.dtype}, shape {array.shape}, is not a list of token ids")
        return array  # type: ignore[no-any-return]
    size = path.stat().st_size
    if not size or size % 2:
        raise ValueError(f"{size} bytes are not a list of uint16 token ids")
    kind = LLM_C.get(tuple(np.fromfile(path, "<i4", 2).tolist())) if size > HEADER else None
    return np.memmap(path, kind or "<u2", "r", offset=HEADER if kind else 0)


def foreign(path: Path) -> TokenFile:
    """A file that another program has written, .npy or .bin. Raises PierError: it has no tokens."""
    try:
        return TokenFile(path, len(_map(path)))
    except (OSError, EOFError, ValueError) as error:
        remedy = "Give .npy files of token ids, .bin files of nanoGPT or llm.c, or a folder of `pier-node tokenize`."
        raise PierError(f"{path}: {getattr(error, 'strerror', None) or error}", remedy) from error
