"""From documents to a folder of tokens: in several processes, and resumable.

One process reads the documents and writes the shards, in the order of the source; the others encode. Whenever enough
tokens have come together, the open shards are closed and named in the manifest, with the number of documents read so
far. After a kill, the next run reads those documents again, which is quick, and encodes what follows them: the tokens
are the same, bit for bit, as without the kill.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from pier_node.base.durable import Torn, unwritable
from pier_node.base.errors import PierError
from pier_node.base.processes import die_with_parent
from pier_node.base.units import amount
from pier_node.config.run import DataSection
from pier_node.trainer.data.shards import MANIFEST, ShardWriter, Split, TokenManifest, TokenShard, smallest
from pier_node.trainer.data.sources import VALIDATION, Source, no_text, open_source
from pier_node.trainer.data.tokens import Tokenizer, Tokens, open_tokenizer

FORMAT = 1
"""Version of the tokens; changed whenever the same files give different tokens."""
BATCH = 1024
BATCH_TEXT = 1 << 22
"""A batch ends after this many documents, or characters: what one process encodes at once."""
THREADS = 2
"""Cores for each process: threads share the tokenizer's tables in the caches of a CPU, but wait while ids are copied.
"""
SHARD = 1 << 26
"""Tokens after which the open shards are closed; a kill loses at most the work on as many."""
SMALL = 1 << 23
"""Bytes of text that are encoded sooner in this process than others could start."""
TELL = 30.0
"""Seconds between two progress reports of tokenizing."""

Told = Callable[[int, int], None]
"""(bytes of text read so far, bytes of the files; 0: unknown)."""

log = logging.getLogger(__name__)


def told_by_log(read: int, size: int) -> None:
    """Report progress in the log."""
    log.info("tokenizing: %s of text read; %s", amount(read), f"the files have {amount(size)}" if size else "a stream")


@dataclass(frozen=True)
class Text:
    """Everything that decides which tokens a folder has: those of part `slot` of `slots` of a source."""

    config: DataSection
    source: Source
    tokenizer: Tokenizer
    slot: int
    slots: int

    @classmethod
    def of(cls, config: DataSection, slot: int, slots: int, path: str | None) -> Text:
        """The text at `path`, or that [data] names. Raises PierError."""
        return cls(config, open_source(config, path), open_tokenizer(config.tokenizer), slot % slots, slots)

    def key(self) -> str:
        """A hash of all inputs. Sizes and modification times stand for the content of files."""
        # Keys that decide nothing here, or that did not exist when the first tokens were cached.
        unused, fields = {"tokenizer_hash", "dealt", "document_mask", "mixture"}, type(self.config).model_fields
        unused |= {"tokenizer"} if self.config.tokenizer_hash else set()
        unused |= {key for key in ("subset", "split", "limit") if getattr(self.config, key) == fields[key].default}
        config = self.config.model_dump_json(exclude=unused)
        terms = (FORMAT, config, self.tokenizer.fingerprint, self.slot, self.slots, self.source.state())
        return hashlib.sha256(repr(terms).encode()).hexdigest()[:32]

    def nothing_yet(self) -> TokenManifest:
        """The manifest of a folder without shards."""
        it = self.tokenizer
        return TokenManifest(key=self.key(), tokenizer=it.fingerprint, vocab_size=it.vocab_size, separator=it.separator)


def encode(tokenizer: Tokenizer, splits: Sequence[Split], texts: list[str]) -> dict[Split, Tokens]:
    """The tokens of documents, each followed by a separator: those of each split together."""
    dtype = smallest(tokenizer.vocab_size)
    ends: Tokens = np.array([] if tokenizer.separator is None else [tokenizer.separator], dtype)
    found: dict[Split, list[Tokens]] = {"train": [], "validation": []}
    for split, tokens in zip(splits, tokenizer.encode_batch(texts), strict=True):
        found[split] += (tokens.astype(dtype, copy=False), ends)
    return {split: np.concatenate(parts) for split, parts in found.items() if parts}


_own: list[Tokenizer] = []
"""That of this process, if it is one of a pool."""


def _begin(tokenizer: str, threads: int) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the process that started this one
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    _own[:] = [open_tokenizer(tokenizer)]


def _encode(splits: Sequence[Split], texts: list[str]) -> dict[Split, Tokens]:
    return encode(_own[0], splits, texts)


@dataclass(frozen=True)
class Batch:
    """Documents to encode, and how much of the source has been read at its end, in documents and bytes of text."""

    splits: list[Split]
    texts: list[str]
    documents: int
    read: int


def batches(text: Text, behind: int, told: Told, tell: float = TELL) -> Iterator[Batch]:
    """The documents of a site and those for validation, in order; the last batch may be empty.

    Args:
        behind: documents of the source to leave out at its start.
        told: called every `tell` seconds.
    """
    size, said = text.source.size(), time.monotonic()
    splits, texts, length, documents, read = list[Split](), list[str](), 0, 0, 0
    config = text.config
    for part, document in text.source.parts(config.validation, text.slot, text.slots, config.limit):
        documents += 1
        read += len(document.text.encode())
        if time.monotonic() - said >= tell:
            said = time.monotonic()
            told(read, size)
        if documents > behind and part in (VALIDATION, text.slot):
            splits.append("validation" if part == VALIDATION else "train")
            texts.append(document.text)
            length += len(document.text)
            if len(texts) == BATCH or length >= BATCH_TEXT:
                yield Batch(splits, texts, documents, read)
                splits, texts, length = [], [], 0
    if not documents:
        raise no_text()
    yield Batch(splits, texts, documents, read)


def encoded(text: Text, found: Iterator[Batch], processes: int) -> Iterator[tuple[Batch, dict[Split, Tokens]]]:
    """Each batch with its tokens, in order.

    Args:
        processes: that encode beside this one; 0: this one encodes, on all cores if the tokenizer supports it.
    """
    if not processes:
        yield from ((batch, encode(text.tokenizer, batch.splits, batch.texts)) for batch in found)
        return
    waiting: deque[tuple[Batch, Future[dict[Split, Tokens]]]] = deque()
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (text.config.tokenizer, threads))
    try:
        for batch in found:
            waiting.append((batch, pool.submit(_encode, batch.splits, batch.texts)))
            while len(waiting) > 3 * processes or (waiting and waiting[0][1].done()):
                done, tokens = waiting.popleft()
                yield done, tokens.result()
        yield from ((batch, tokens.result()) for batch, tokens in waiting)
    except BrokenProcessPool as error:
        remedy = "`dmesg` says whether memory ran out. Start again: what is tokenized already is kept."
        raise PierError("a process that tokenizes has died", remedy) from error
    finally:
        pool.shutdown(cancel_futures=True)


def useful_processes(text: Text) -> int:
    """How many processes besides this one encode a text: one for every two cores, or none if that is quicker."""
    small = 0 < text.source.size() < SMALL
    alone = small or text.tokenizer.fingerprint == "bytes"
    return 0 if alone else max(1, len(os.sched_getaffinity(0)) // THREADS)


def tokenize(text: Text, folder: Path, told: Told, processes: int | None = None, tell: float = TELL) -> TokenManifest:
    """Write the tokens of a text into a folder, or continue to; nobody else may do so meanwhile. Returns its manifest.

    Args:
        told: called every `tell` seconds.
        processes: see `encoded`; None: as many as are useful.

    Raises:
        PierError: the text cannot be read, or the folder cannot be written. What is done so far stays there.
    """
    processes = useful_processes(text) if processes is None else processes
    try:
        folder.mkdir(parents=True, exist_ok=True)
        manifest = _begun(text, folder)
        manifest.save(folder)
        _sweep(folder, manifest)
        if manifest.documents:
            log.info("%s: continues after %s of text", folder, amount(manifest.read))
        try:
            return _write(text, ShardWriter(folder, manifest), told, processes, tell)
        except BaseException:
            with suppress(OSError, Torn):
                _sweep(folder, TokenManifest.load(folder))
            raise
    except OSError as error:
        raise unwritable(f"cannot write tokens in {folder}", error) from error


def _write(text: Text, writer: ShardWriter, told: Told, processes: int, tell: float) -> TokenManifest:
    found = batches(text, writer.manifest.documents, told, tell)
    try:
        for batch, tokens in encoded(text, found, processes):
            for split, some in tokens.items():
                writer.append(split, some)
            if writer.pending >= SHARD:
                writer.commit(batch.documents, batch.read)
        writer.commit(batch.documents, batch.read, complete=True)
    finally:
        writer.abandon()
    return writer.manifest


def _begun(text: Text, folder: Path) -> TokenManifest:
    """The manifest to continue from: that of an unfinished folder, or an empty one."""
    empty = text.nothing_yet()
    try:
        found = TokenManifest.load(folder)
        if found.key == empty.key and not found.complete:
            found.check(folder)
            return found
    except (OSError, Torn):
        pass  # there is nothing to continue from
    return empty


def _sweep(folder: Path, manifest: TokenManifest) -> None:
    """Remove shards that are not in the manifest: unfinished ones, and those of older tokens."""
    named = {shard.name for shard in (*manifest.train, *manifest.validation)}
    for path in folder.glob("*.npy"):
        if path.name not in named:
            path.unlink()


def whole(folder: Path, key: str) -> TokenManifest | None:
    """The manifest of a folder with all tokens that `key` names; None: they are not there, unfinished or damaged."""
    if not (folder / MANIFEST).exists():
        return None
    try:
        manifest = TokenManifest.load(folder)
        if manifest.key != key or not manifest.complete:
            return None
        manifest.check(folder)
        return manifest
    except (OSError, Torn) as error:
        log.warning("%s is damaged; it is made again: %s", folder, error)
        return None


LOOK = 0.2
"""Seconds between two looks for tokens that another process makes."""
CHECK = "check.json"
"""The fingerprints of a folder that was made when there were no manifests: of train.npy and validation.npy."""


def cached(text: Text, cache: Path, told: Told, tokenizes: bool = True) -> tuple[Path, TokenManifest]:
    """The folder with the tokens of a text, below `cache`, and its manifest. They are made if they are not there.

    If several processes call this at once, one does the work, however long it takes, and the others wait.

    Args:
        tokenizes: False: wait for another process to do so.

    Raises:
        PierError: the text cannot be read, or `cache` cannot be written.
    """
    key = text.key()
    folder = cache / f"corpus-{key}"
    manifest = whole(folder, key)
    while manifest is None and not tokenizes:
        time.sleep(LOOK)
        manifest = whole(folder, key)
    if manifest is None:
        with locked(cache, cache.with_name(f"{cache.name}.lock")):
            for left in cache.glob("building-*"):  # by an older version of Pier that was killed
                shutil.rmtree(left)
            _adopt(text, folder)
            manifest = whole(folder, key)  # another process may have made it while this one waited
            if manifest is None:
                log.info("tokenizing %d files into %s", len(text.source.entries), folder)
                try:
                    manifest = tokenize(text, folder, told)
                except PierError:
                    if not _begun(text, folder).documents:
                        shutil.rmtree(folder, ignore_errors=True)
                    raise
    return folder, manifest


@contextmanager
def locked(folder: Path, lock: Path) -> Iterator[None]:
    """Make a folder, and lock it for one process that writes tokens there; others wait. Raises PierError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = lock.open("ab")
    except OSError as error:
        raise PierError(f"{folder}: {error.strerror}", "Give a data directory that can be written.") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel releases it when its holder dies
        yield


def _adopt(text: Text, folder: Path) -> None:
    """Give a folder that was made when there were no manifests the one that describes it."""
    if not (folder / CHECK).exists():
        return
    shards: dict[str, tuple[TokenShard, ...]] = {}
    try:
        for name, check in json.loads((folder / CHECK).read_text()).items():
            if tokens := len(np.load(folder / name, mmap_mode="r")):
                shards[name.removesuffix(".npy")] = (TokenShard(name=name, tokens=tokens, check=check),)
        text.nothing_yet().model_copy(update={**shards, "complete": True}).save(folder)
        log.info("%s has tokens of an older version of Pier; they are used as they are", folder)
    except (OSError, ValueError) as error:
        log.warning("%s is damaged; it is made again: %s", folder, error)
    (folder / CHECK).unlink()
