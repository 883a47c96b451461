"""The tokens that a site trains on, and the windows of them that make a batch.

A corpus has one source, or several with weights. The tokens of text are made once and kept in the site's cache
(tokenizing.py); those of `source = "tokens"` are read where they are. Either way a site opens only the shards with its
own part and those for validation.

The windows of a step are a pure function of (seed, node, step): Philox (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011), keyed by seed and node, counts from the step's number. So a worker draws only its own rows,
there is no data state to save, and a site that resumes at any step draws the tokens that it would have drawn: neither
the number of its workers nor other sites that come or go change them. Only a site that joins as another node, or into
another slot, sees others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from pier_node.base.durable import Torn
from pier_node.base.errors import PierError
from pier_node.base.units import several
from pier_node.config.run import DataSection, RunConfig
from pier_node.trainer.data.shards import MANIFEST, Split, Stream, TokenFile, TokenManifest, count, foreign, opened
from pier_node.trainer.data.sources import VALIDATION, find_entries, no_text
from pier_node.trainer.data.tokenizing import Text, Told, cached, told_by_log
from pier_node.trainer.data.tokens import Tokenizer, check_vocab, document_separator, open_tokenizer


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
        own = not shared and (dataset is not None or not config.data.dealt)
        return cls(0, 1, dataset) if own else cls(slot % config.run.sites, config.run.sites, dataset)

    def describe(self, config: RunConfig) -> str:
        """One sentence for the site's operator."""
        held_out = f"all except the {100 * config.data.validation:.3g} % validation split"
        part = f"part {self.slot + 1} of {self.slots}" if self.slots > 1 else held_out
        if self.path is None:
            name = _named(config.data)
            if not config.data.dealt:
                return f"This site trains on its own data, {name}: {held_out}. data.dealt = false in the run."
            return f"This site trains on {part} of {name}, which is the same at every site."
        if self.slots > 1:
            return f"This site trains on {part} of {self.path}: a copy of the run's data, divided among the sites."
        return (
            f"This site trains on its own data, {self.path}: {held_out}. "
            "If every site has a copy of the same data, start with --shared-data."
        )


def _named(data: DataSection) -> str:
    if data.mixture:
        return f"a mixture of {len(data.mixture)} sources"
    return "the built-in text" if data.source == "stdlib" else f"data.path = {data.path}"


LOOK = 1 << 24
"""Characters of a source that are read before a site starts: one that has more is not too small for a window."""


def check_data(config: RunConfig, site: SiteData) -> None:
    """Check the tokenizer, and that each source has text, and enough of it for a window.

    Raises:
        PierError: they cannot be used, there is too little text, or the tokenizer is not that of the run, or has more
            tokens than the model.
    """
    tokenizer, wanted = open_tokenizer(config.data.tokenizer), config.data.tokenizer_hash
    if wanted not in ("", tokenizer.fingerprint):
        raise PierError(
            f"data.tokenizer = {config.data.tokenizer} is another file than that of the run: its SHA-256 begins with "
            f"{tokenizer.fingerprint[:12]}, that of the run's with {wanted[:12]}",
            "Copy the file of the run's founder to this path.",
        )
    check_vocab(tokenizer.vocab_size, config.model.vocab_size, config.begins_pretrained)
    document_separator(config.data)
    sources = [(1.0, config.data)] if site.path else config.data.parts()
    for _, data in sources:
        if data.source == "tokens":
            files = _token_files(data, site.path, tokenizer)
            train, validation = map(len, _dealt(*files, data.validation, site.slot % site.slots, site.slots))
        else:
            train, validation = _looked_through(data, site, config.model.context + 1)
        of = f" ({site.path or _named(data)})" if len(sources) > 1 else ""
        require_window(train, validation, config.model.context, of)


def _looked_through(data: DataSection, site: SiteData, enough: int) -> tuple[int, int]:
    """Tokens to train on and for validation, counted up to `enough` of each. Raises PierError: there is no text."""
    text = Text.of(data, site.slot, site.slots, site.path)
    if not text.source.size():  # a stream: each document comes over the network
        if next(text.source.documents(), None) is None:
            raise no_text()
        return enough, enough
    found: dict[Split, int] = {"train": 0, "validation": 0}
    read = 0
    for part, document in text.source.parts(data.validation, text.slot, text.slots, data.limit):
        read += len(document.text)
        split: Split = "validation" if part == VALIDATION else "train"
        if part in (VALIDATION, text.slot) and found[split] < enough:
            tokens = text.tokenizer.encode_batch([document.text])[0]
            found[split] += len(tokens) + (text.tokenizer.separator is not None)
        if min(found.values()) >= enough or read > LOOK:
            return enough, enough
    if not read:
        raise no_text()
    return found["train"], found["validation"]


def require_window(train: int, validation: int, context: int, of: str) -> None:
    """Check that there are tokens enough for a window, of a source that `of` names. Raises PierError."""
    needs = f"one window of model.context = {context} needs {context + 1}"
    if train <= context:
        problem = f"the data to train on here{of} has {several(train, 'token')}; {needs}"
        raise PierError(problem, "Add text, deal it to fewer sites (run.sites), or lower model.context.")
    if validation <= context:
        problem = f"the validation part of the data{of} has {several(validation, 'token')}; {needs}"
        raise PierError(problem, "Add text, raise data.validation, or lower model.context.")


@dataclass(frozen=True)
class Part:
    """The tokens of one source: documents one after the other, each followed by a separator if the tokenizer has one.

    Attributes:
        train: this slot's part; it shares nothing with other slots.
        validation: tokens that no slot trains on, the same at every site with the same data.
        weight: its fraction of the sequences.
        name: of the source, for people.
    """

    train: Stream
    validation: Stream
    weight: float = 1.0
    name: str = "the data"


@dataclass(frozen=True)
class Corpus:
    """Read-only tokens, with a part for each source."""

    parts: tuple[Part, ...]

    @property
    def train(self) -> Stream:
        """The training tokens of all sources, one after the other."""
        return Stream(array for part in self.parts for array in part.train.arrays)

    @property
    def validation(self) -> Stream:
        """The validation tokens of all sources, one after the other."""
        return Stream(array for part in self.parts for array in part.validation.arrays)


def open_corpus(
    config: DataSection,
    slot: int,
    slots: int,
    path: str | None,
    cache: Path,
    told: Told = told_by_log,
    tokenizes: bool = True,
) -> Corpus:
    """The corpus of a site: part `slot` modulo `slots` of the data at `path`, or of the data that [data] names.

    The first call reads and tokenizes everything and caches the tokens in the folder `cache`; later calls map them. If
    several processes call it at once, one does the work, however long it takes, and the others wait.

    Args:
        told: called now and then while this process tokenizes.
        tokenizes: False: wait for another process to do so.

    Raises:
        PierError: the data or the tokenizer cannot be used, or `cache` cannot be written.
    """
    tokenizer = open_tokenizer(config.tokenizer)
    parts = list[Part]()
    for weight, data in [(1.0, config)] if path else config.parts():
        if data.source == "tokens":
            train, validation = _token_files(data, path, tokenizer)
            streams = _dealt(train, validation, data.validation, slot % slots, slots)
            _check_ids(streams, tokenizer, path or data.path)
        else:
            folder, manifest = cached(Text.of(data, slot, slots, path), cache, told, tokenizes)
            train, validation = manifest.files(folder, "train"), manifest.files(folder, "validation")
            streams = opened(train, 0, count(train)), opened(validation, 0, count(validation))
        parts.append(Part(*streams, weight, path or _named(data)))
    return Corpus(tuple(parts))


def _token_files(data: DataSection, path: str | None, tokenizer: Tokenizer) -> tuple[list[TokenFile], list[TokenFile]]:
    """The files of tokens to train on, and those for validation, of all sites; only those without a manifest are read.

    Raises PierError.
    """
    root = Path(path or data.path).expanduser()
    if not (root / MANIFEST).exists():
        files = [entry.path for entry in find_entries(root) if entry.path.suffix in (".bin", ".npy")]
        if not files:
            raise PierError(f"{root} has no tokens", "Give a folder that has .npy or .bin files.")
        held_out = [file for file in files if len(files) > 1 and "val" in file.name]
        return [foreign(file) for file in files if file not in held_out], [foreign(file) for file in held_out]
    try:
        manifest = TokenManifest.load(root)
    except Torn as error:
        raise PierError(f"{root}: {error}", "Copy this file again, or run `pier-node tokenize` again.") from error
    if not manifest.complete:
        raise PierError(f"the tokens in {root} are unfinished", "Run `pier-node tokenize` again: it continues.")
    if manifest.tokenizer != tokenizer.fingerprint:
        problem = f"data.tokenizer = {data.tokenizer}: the tokens in {root} were made with another tokenizer"
        raise PierError(problem, "Give the tokenizer that `pier-node tokenize` was given.")
    return manifest.files(root, "train"), manifest.files(root, "validation")


def _dealt(
    train: list[TokenFile], validation: list[TokenFile], fraction: float, slot: int, slots: int
) -> tuple[Stream, Stream]:
    """A slot's tokens, which follow each other, and those for validation: if no file is for that, the last ones."""
    total = count(train)
    own = total if validation else total - max(1, int(total * fraction))
    held_out = opened(validation, 0, count(validation)) if validation else opened(train, own, total)
    return opened(train, own * slot // slots, own * (slot + 1) // slots), held_out


SAMPLE = 1 << 16
"""Tokens of each shard that are compared with the tokenizer."""


def _check_ids(streams: tuple[Stream, Stream], tokenizer: Tokenizer, where: str) -> None:
    largest = max((int(array[:SAMPLE].max()) for stream in streams for array in stream.arrays), default=0)
    if largest >= tokenizer.vocab_size:
        raise PierError(
            f"{where} has token {largest}; the tokenizer has {tokenizer.vocab_size} tokens",
            "Set [data] tokenizer to the tokenizer.json that these tokens were made with.",
        )


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

    With several sources, each row draws its source by weight.

    Args:
        vocab_size: of the model. Windows with a token that it lacks are refused, with a PierError; None: they are not.

    Raises:
        PierError: a source is too small for one window.
    """

    def __init__(self, corpus: Corpus, context: int, seed: int, node: str, vocab_size: int | None = None) -> None:
        self._context, self._vocab_size = context, vocab_size
        self._train = [part.train for part in corpus.parts]
        self._validation = [part.validation for part in corpus.parts]
        self._ends = np.cumsum([part.weight for part in corpus.parts])
        self._key = int.from_bytes(hashlib.blake2b(f"{seed} {node}".encode(), digest_size=16).digest(), "big")
        for part in corpus.parts:
            of = f" ({part.name})" if len(corpus.parts) > 1 else ""
            require_window(len(part.train), len(part.validation), context, of)

    def batch(self, step: int, sequences: int) -> Batch:
        """All windows of a step."""
        return self.rows(step, 0, sequences)

    def rows(self, step: int, first: int, count: int) -> Batch:
        """Rows first..first+count-1 of a step's batch, whatever its size: see `share`."""
        chosen = self._chosen(self._draws(step, 1, first, count) / 2.0**64)
        places = np.array([len(stream) - self._context for stream in self._train], np.uint64)
        return self._cut(self._train, chosen, self._draws(step, 0, first, count) % places[chosen])

    def validation(
        self, batches: int, sequences: int, at_once: int = 0, worker: int = 0, workers: int = 1
    ) -> list[Batch]:
        """Windows spread evenly over the validation part, always the same and at every site.

        Of several sources, each has its weight's fraction of the windows, rounded.

        Args:
            at_once: maximum sequences in a returned batch; 0: `sequences`.
            worker, workers: only this worker's share of the `batches * sequences` windows.
        """
        total, size = batches * sequences, at_once or sequences
        chosen = self._chosen((np.arange(total) + 0.5) / total)
        starts = np.empty(total, np.int64)
        for index, stream in enumerate(self._validation):
            mine = chosen == index
            number = int(mine.sum())
            starts[mine] = np.arange(number) * (len(stream) - self._context - 1) // max(number - 1, 1)
        first, own = share(total, worker, workers)
        places = [slice(index, min(index + size, first + own)) for index in range(first, first + own, size)]
        return [self._cut(self._validation, chosen[place], starts[place]) for place in places]

    def _draws(self, step: int, purpose: int, first: int, count: int) -> npt.NDArray[np.uint64]:
        # random_raw, because NumPy guarantees the bit stream of Philox, but not what `integers` makes of it.
        stream = np.random.Philox(key=self._key, counter=[0, 0, purpose, step])
        return np.asarray(stream.random_raw(first + count))[first:]

    def _chosen(self, places: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
        """The source of each row, of places from 0 to 1 in the sum of the weights."""
        return np.minimum(np.searchsorted(self._ends, places, side="right"), len(self._ends) - 1)

    def _cut(self, streams: Sequence[Stream], chosen: npt.NDArray[np.intp], starts: npt.NDArray[np.integer]) -> Batch:
        windows = np.empty((len(starts), self._context + 1), np.int64)
        for index, stream in enumerate(streams):
            mine = chosen == index
            windows[mine] = stream.windows(starts[mine], self._context + 1)
        ends = int(windows.min(initial=0)), int(windows.max(initial=0))
        if self._vocab_size is not None and not 0 <= ends[0] <= ends[1] < self._vocab_size:
            raise PierError(
                f"the data has token {ends[0] or ends[1]}; model.vocab_size = {self._vocab_size}",
                "Use a tokenizer or token files that were made for this model, or take that text out.",
            )
        return windows[:, :-1], windows[:, 1:]
