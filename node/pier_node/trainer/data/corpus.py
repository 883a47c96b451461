"""The text that a site trains on, and its tokens: tokenized once, cached on disk, memory-mapped.

A token file is one flat .npy array, written as a stream. Its fingerprint detects damage.

The windows of a step are a pure function of (seed, node, step): Philox (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011), keyed by seed and node, counts from the step's number. A resumed run needs no data state,
and a worker draws only its own rows.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pier_node.base.errors import PierError
from pier_node.base.units import amount
from pier_node.config.run import DataSection, RunConfig
from pier_node.trainer.data.sources import VALIDATION, Source, no_text, open_source, part_of
from pier_node.trainer.data.tokens import Tokenizer, Tokens, check_vocab, open_tokenizer


@dataclass(frozen=True)
class SiteData:
    """A site's training data. No site trains on the validation documents, whatever its part.

    Attributes:
        slot, slots: it trains on part `slot` of `slots` of the documents.
        path: replaces data.path here; None: as in the run's configuration.
    """

    slot: int = 0
    slots: int = 1
    path: str | None = None

    @classmethod
    def of(cls, config: RunConfig, slot: int, dataset: str | None, shared: bool) -> Self:
        """The training data of the site with this slot.

        A site's own data belongs to no other site, so it trains on all of it. Data that every site has is divided.

        Args:
            dataset: path of --dataset.
            shared: it contains the same data as at the other sites (--shared-data).
        """
        own = dataset is not None and not shared
        return cls(0, 1, dataset) if own else cls(slot % config.run.sites, config.run.sites, dataset)

    def describe(self, config: RunConfig) -> str:
        """One sentence for the site's operator."""
        held_out = f"all except the {100 * config.data.validation:.3g} % validation split"
        part = f"part {self.slot + 1} of {self.slots}" if self.slots > 1 else held_out
        if self.path is None:
            name = "the built-in text" if config.data.source == "stdlib" else f"data.path = {config.data.path}"
            return f"This site trains on {part} of {name}, which is the same at every site."
        if self.slots > 1:
            return f"This site trains on {part} of {self.path}: a copy of the run's data, divided among the sites."
        return (
            f"This site trains on its own data, {self.path}: {held_out}. "
            "If every site has a copy of the same data, start with --shared-data."
        )


def check_data(config: RunConfig, dataset: str | None) -> None:
    """Check the tokenizer and the first document.

    Raises:
        PierError: they cannot be used, there is no text, or the tokenizer has more tokens than the model.
    """
    check_vocab(open_tokenizer(config.data.tokenizer).vocab_size, config.model.vocab_size)
    if next(open_source(config.data, dataset).documents(), None) is None:
        raise no_text()


BLOCK = 1 << 16
BLOCKS = 256
"""Number of blocks of BLOCK bytes in a fingerprint: all of a file up to 16 MiB, evenly spaced ones of a larger file."""


class TokenWriter:
    """Appends tokens to a new .npy file, which is complete after `close`."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._file = path.open("wb")
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

    def _write_header(self) -> None:
        description = np.lib.format.dtype_to_descr(self._dtype)
        header = {"shape": (self.length,), "fortran_order": False, "descr": description}
        np.lib.format.write_array_header_1_0(self._file, header)


def fingerprint(path: Path) -> str:
    """Size and CRC-32 of blocks of a file, in a time that does not grow with the file."""
    size, crc = path.stat().st_size, 0
    spread = (index * (size - BLOCK) // (BLOCKS - 1) for index in range(BLOCKS))
    with path.open("rb") as file:
        for start in spread if size > BLOCK * BLOCKS else range(0, size, BLOCK):
            file.seek(start)
            crc = zlib.crc32(file.read(BLOCK), crc)
    return f"{size}-{crc:08x}"


FORMAT = 1
"""Version of the tokens; changed whenever the same files give different tokens."""
BATCH = 256
"""Documents that are tokenized in one batch, on all cores if the tokenizer supports it."""
TRAIN, HELD_OUT, CHECK = "train.npy", "validation.npy", "check.json"
BUILDING = "building-"
"""Prefix of the folder of an unfinished corpus."""
TELL = 30.0
"""Seconds between two progress reports of tokenizing."""
LOOK = 0.2
"""Seconds between two looks for tokens that another process makes."""

Told = Callable[[int, int], None]
"""(bytes of text read so far, bytes of the files): see `open_corpus`."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """Read-only tokens: documents one after the other, each followed by a separator.

    Attributes:
        train: this slot's part, uint8, uint16 or uint32 [tokens]; it shares nothing with other slots.
        validation: tokens that no slot trains on, the same at every site with the same data.
        vocab_size: upper limit of ids, exclusive.
    """

    train: Tokens
    validation: Tokens
    vocab_size: int


@dataclass(frozen=True)
class _Dealing:
    """Everything that decides which tokens a corpus has."""

    config: DataSection
    source: Source
    tokenizer: Tokenizer
    slot: int
    slots: int
    told: Told

    def key(self) -> str:
        """A hash of all inputs. Sizes and modification times stand for the content of files."""
        stats = [(str(entry.path.resolve()), entry.name, entry.path.stat()) for entry in self.source.entries]
        files = [(path, name, stat.st_size, stat.st_mtime_ns) for path, name, stat in stats]
        terms = (FORMAT, self.config.model_dump_json(), self.tokenizer.fingerprint, self.slot, self.slots, files)
        return hashlib.sha256(repr(terms).encode()).hexdigest()[:32]

    def wanted(self) -> Iterator[tuple[str, str]]:
        """The file and the text of each document for this slot's training or for validation."""
        size = sum(entry.path.stat().st_size for entry in self.source.entries)
        documents = read = 0
        told = time.monotonic()
        for document in self.source.documents():
            documents += 1
            read += len(document.text.encode())
            if time.monotonic() - told >= TELL:
                told = time.monotonic()
                self.told(read, size)
            part = part_of(document, self.config.validation, self.slots)
            if part in (VALIDATION, self.slot):
                yield HELD_OUT if part == VALIDATION else TRAIN, document.text
        if not documents:
            raise no_text()


def _log(read: int, size: int) -> None:
    log.info("tokenizing: %s of text read; the files have %s", amount(read), amount(size))


def open_corpus(
    config: DataSection,
    slot: int,
    slots: int,
    path: str | None,
    cache: Path,
    told: Told = _log,
    tokenizes: bool = True,
) -> Corpus:
    """The corpus of a site: part `slot` modulo `slots` of the data at `path`, or of the data that [data] names.

    The first call reads and tokenizes everything and caches the tokens in the folder `cache`; later calls map them. If
    several processes call it at once, one does the work, however long it takes, and the others wait.

    Args:
        told: called every TELL seconds while this process tokenizes.
        tokenizes: False: wait for another process to do so.

    Raises:
        PierError: the data or the tokenizer cannot be used, or `cache` cannot be written.
    """
    tokenizer = open_tokenizer(config.tokenizer)
    dealing = _Dealing(config, open_source(config, path), tokenizer, slot % slots, slots, told)
    folder = cache / f"corpus-{dealing.key()}"
    while not folder.exists() or not _is_whole(folder):
        if tokenizes:
            _build(dealing, folder)
        else:
            time.sleep(LOOK)
    train, validation = (np.load(folder / name, mmap_mode="r") for name in (TRAIN, HELD_OUT))
    return Corpus(train, validation, tokenizer.vocab_size)


def _is_whole(folder: Path) -> bool:
    try:
        if json.loads((folder / CHECK).read_text()) == _fingerprints(folder):
            return True
    except (OSError, ValueError) as error:
        log.warning("%s: %s", folder, error)
    log.warning("%s is damaged; it is made anew", folder)
    return False


def _fingerprints(folder: Path) -> dict[str, str]:
    return {name: fingerprint(folder / name) for name in (TRAIN, HELD_OUT)}


def _build(dealing: _Dealing, folder: Path) -> None:
    """Build under a temporary name, so that the folder appears complete or not at all."""
    with _alone(folder.parent):
        if folder.exists() and _is_whole(folder):
            return  # another process has built it while this one waited
        log.info("tokenizing %d files into %s", len(dealing.source.entries), folder)
        building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=BUILDING))
        try:
            _tokenize(dealing, building)
            if folder.exists():
                shutil.rmtree(folder)
            os.rename(building, folder)
        except OSError as error:
            raise PierError(f"{folder}: {error.strerror}", "Free some space, or use another data directory.") from error
        finally:
            if building.exists():
                shutil.rmtree(building)


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Lock the cache for one process that builds a corpus, and remove what killed processes left."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = cache.with_name(f"{cache.name}.lock").open("ab")
    except OSError as error:
        raise PierError(f"{cache}: {error.strerror}", "Give a data directory that can be written.") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when its holder dies
        for left in cache.glob(f"{BUILDING}*"):
            shutil.rmtree(left)
        yield


def _tokenize(dealing: _Dealing, folder: Path) -> None:
    tokenizer, wanted = dealing.tokenizer, dealing.wanted()
    dtype = np.min_scalar_type(max(tokenizer.vocab_size - 1, 0))
    separator = np.array([] if tokenizer.separator is None else [tokenizer.separator], dtype=dtype)
    writers = {name: TokenWriter(folder / name, dtype) for name in (TRAIN, HELD_OUT)}
    while batch := list(islice(wanted, BATCH)):
        for (name, _), tokens in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
            writers[name].append(tokens)
            writers[name].append(separator)
    for writer in writers.values():
        writer.close()
    (folder / CHECK).write_text(json.dumps(_fingerprints(folder)))


Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Inputs and targets, [sequences, context] each; targets are the inputs one token later."""


def share(sequences: int, worker: int, workers: int) -> tuple[int, int]:
    """The rows (first, count) of worker 0..workers-1 in a batch.

    Sizes differ by at most one, and together they are all.
    """
    first, end = (sequences * index // workers for index in (worker, worker + 1))
    return first, end - first


class Windows:
    """Windows of `context` tokens of a corpus: random with replacement for training by `node`, fixed for validation.

    Raises:
        PierError: the corpus is too small for one window.
    """

    def __init__(self, corpus: Corpus, context: int, seed: int, node: str) -> None:
        self._corpus, self._context = corpus, context
        self._train_starts = len(corpus.train) - context
        self._validation_starts = len(corpus.validation) - context
        self._key = int.from_bytes(hashlib.blake2b(f"{seed} {node}".encode(), digest_size=16).digest(), "big")
        needs = f"one window of model.context = {context} needs {context + 1}"
        if self._train_starts < 1:
            problem = f"this site's part of the training data has {len(corpus.train)} tokens; {needs}"
            raise PierError(problem, "Add text, deal it to fewer sites (run.sites), or lower model.context.")
        if self._validation_starts < 1:
            problem = f"the validation part of the data has {len(corpus.validation)} tokens; {needs}"
            raise PierError(problem, "Add text, raise data.validation, or lower model.context.")

    def batch(self, step: int, sequences: int) -> Batch:
        """All windows of a step."""
        return self.rows(step, 0, sequences)

    def rows(self, step: int, first: int, count: int) -> Batch:
        """Rows first..first+count-1 of a step's batch, whatever its size: see `share`."""
        # random_raw, because NumPy guarantees the bit stream of Philox, but not what `integers` makes of it.
        stream = np.random.Philox(key=self._key, counter=[0, 0, 0, step])
        draws = np.asarray(stream.random_raw(first + count))[first:]
        return self._cut(self._corpus.train, draws % np.uint64(self._train_starts))

    def validation(
        self, batches: int, sequences: int, at_once: int = 0, worker: int = 0, workers: int = 1
    ) -> list[Batch]:
        """Windows spread evenly over the validation part, always the same and at every site.

        Args:
            at_once: maximum sequences in a returned batch; 0: `sequences`.
            worker, workers: only this worker's share of the `batches * sequences` windows.
        """
        count, size = batches * sequences, at_once or sequences
        starts = np.arange(count) * (self._validation_starts - 1) // max(count - 1, 1)
        first, own = share(count, worker, workers)
        parts = (starts[index : min(index + size, first + own)] for index in range(first, first + own, size))
        return [self._cut(self._corpus.validation, part) for part in parts]

    def _cut(self, tokens: Tokens, starts: npt.NDArray[np.integer]) -> Batch:
        offsets = np.arange(self._context + 1)
        windows = tokens[starts.astype(np.int64)[:, None] + offsets].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]
