"""The text of a domain: how much there is to train on, its hash, samples to measure it with, and held-out rows.

`python -m pier_node.experts.domains JOB CONTEXT FOLDER` reads the text of a job in a separate process. Reading may take
minutes. Meanwhile the site's daemon stays responsive, and the process ends with the daemon.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pier_node.base.errors import PierError
from pier_node.base.processes import answer, die_with_parent
from pier_node.experts.config import DomainSection
from pier_node.experts.job import ExpertJob
from pier_node.trainer.data.sources import HELD_OUT, SPLITS, VALIDATION, Document, Split, open_source, part_of

SCORED = 1 << 18
"""Maximum bytes kept of a split, sampled evenly from all documents."""


@dataclass(frozen=True)
class DomainText:
    """A domain that was read.

    Attributes:
        tokens: bytes to train on (a byte is a token), with a separator after each document.
        sent: bytes of the whole text, as a site would fetch it; 0 for a text that every site has.
        digest: hash of names and texts, hex: equal if the text is equal.
        train, held_out: samples.
    """

    name: str
    tokens: int
    sent: int
    digest: str
    train: bytes
    held_out: bytes


def read_domain(section: DomainSection, train: int, held_out: int) -> DomainText:
    """Read a domain, and keep samples of at most the given numbers of bytes, and at least half as much if available.

    Raises:
        PierError: the domain cannot be read, or has too little text to hold any out.
    """
    digest, kept = hashlib.blake2b(digest_size=16), {True: _Sample(train), False: _Sample(held_out)}
    for document in _documents(section, digest):
        kept[_is_trained_on(document)].add(document)
    if not kept[True].size or not kept[False].size:
        raise PierError(
            f"domain {section.name}: too little text to train on some of it and to hold some out",
            "Give it more documents, or longer ones.",
        )
    sent = 0 if section.source == "builtin" else kept[True].size + kept[False].size
    return DomainText(section.name, kept[True].size, sent, digest.hexdigest(), kept[True].text(), kept[False].text())


def read_domains(sections: Iterable[DomainSection], train: int, held_out: int) -> list[DomainText]:
    """Read all domains with `read_domain`. Raises PierError, also when two domains have the same text."""
    found = [read_domain(section, train, held_out) for section in sections]
    seen: dict[str, str] = {}
    for domain in found:
        if other := seen.get(domain.digest):
            raise PierError(f"domains {other} and {domain.name} have the same text", "Domains must not overlap.")
        seen[domain.digest] = domain.name
    return found


@dataclass(frozen=True)
class HeldOut:
    """The held-out text of a domain, with which its expert is evaluated.

    Attributes:
        tokens: bytes to train on.
        digest: as in DomainText.
        texts: of each split, at most SCORED bytes.
    """

    tokens: int
    digest: str
    texts: dict[Split, bytes]


def read_held_out(section: DomainSection) -> HeldOut:
    """Read a domain and keep what no expert trains on: each held-out document goes to the split with the least text.

    Raises:
        PierError: it cannot be read, or a split has no text.
    """
    digest, tokens, kept = hashlib.blake2b(digest_size=16), 0, {split: _Sample(SCORED) for split in SPLITS}
    for document in _documents(section, digest):
        if _is_trained_on(document):
            tokens += len(document.text.encode()) + 1
        else:
            min(kept.values(), key=lambda sample: sample.size).add(document)
    if empty := [split for split in SPLITS if not kept[split].size]:
        raise PierError(
            f"domain {section.name}: too few documents, none of them is held out for {empty[0]}",
            "Give it more documents, or longer ones.",
        )
    return HeldOut(tokens, digest.hexdigest(), {split: kept[split].text() for split in SPLITS})


def rows_of(text: bytes, context: int) -> npt.NDArray[np.uint8]:
    """A text cut into rows of context + 1 bytes, [rows, context + 1]; an incomplete last row is dropped.

    The last byte of a row is the first byte of the next. So every byte but the first is predicted once.
    """
    tokens = np.frombuffer(text, dtype=np.uint8)
    count = max(0, (len(tokens) - 1) // context)
    return np.asarray(tokens[np.arange(count)[:, None] * context + np.arange(context + 1)])


def _documents(section: DomainSection, digest: hashlib.blake2b) -> Iterator[Document]:
    for document in open_source(section.data).documents():
        digest.update(b"%b\0%b\0" % (document.name.encode(errors="surrogateescape"), document.text.encode()))
        yield document


def _is_trained_on(document: Document) -> bool:
    return part_of(document, HELD_OUT, 1) != VALIDATION


class _Sample:
    """A sample from a sequence of documents of unknown length: every stride-th one, with a growing stride."""

    def __init__(self, most: int) -> None:
        self._most, self._stride, self._count = most, 1, 0
        self._kept: list[bytes] = []
        self._length, self.size = 0, 0

    def add(self, document: Document) -> None:
        """Add the next document."""
        text = document.text.encode() + b"\n"
        self.size += len(text)
        if self._count % self._stride == 0:
            self._kept.append(text)
            self._length += len(text)
            while self._length > self._most and len(self._kept) > 1:
                self._kept, self._stride = self._kept[::2], self._stride * 2
                self._length = sum(map(len, self._kept))
        self._count += 1

    def text(self) -> bytes:
        """The sample."""
        return b"".join(self._kept)[: self._most]


ROWS_FILE = "dev.npy"
FEWEST_ROWS, MOST_ROWS = 2, 256
"""Minimum number of rows for a standard error, and maximum number of rows used, sampled from the whole dev split."""


@dataclass(frozen=True)
class Text:
    """The text that was read.

    Attributes:
        tokens: number of tokens to train on.
        rows: file of the rows that evaluate the expert, [rows, context + 1].
    """

    tokens: int
    rows: Path


async def read_text(job: ExpertJob, context: int, folder: Path) -> Text:
    """Read the text in another process, which ends when this is cancelled.

    Raises:
        PierError: the text cannot be read, is not the one of the plan, or is too short.
    """
    words = job.model_dump_json(), str(context), str(folder)
    told = await answer(__name__, *words, start_new_session=True)  # Ctrl+C in the daemon's terminal must not reach it
    if told.code:
        said = told.errors.strip().splitlines()[-1:]
        raise PierError(f"domain {job.domain.name} cannot be read: {' '.join(said) or f'exit {told.code}'}")
    found = json.loads(told.output)
    if "problem" in found:
        raise PierError(found["problem"], found["remedy"])
    return Text(found["tokens"], folder / ROWS_FILE)


def checked_text(job: ExpertJob, context: int, folder: Path) -> Text:
    """Read the text in this process; see `read_text`."""
    text = read_held_out(job.domain)
    if text.digest != job.domain_hash:
        raise PierError(
            f"domain {job.domain.name}: the text here is not the one that was planned with",
            "Give this site the same files; of a built-in domain, the same Python version.",
        )
    tokens = job.steps * job.batch_size * context
    if tokens > job.max_epochs * text.tokens + job.batch_size * context:  # steps are whole
        raise PierError(
            f"domain {job.domain.name}: {job.steps} steps are {tokens / text.tokens:.1f} epochs; "
            f"allowed: {job.max_epochs:g}",
            "Plan fewer steps, or raise experts.max_epochs.",
        )
    rows = judging(text, context)
    if len(rows) < FEWEST_ROWS:
        raise PierError(
            f"domain {job.domain.name}: {len(text.texts['dev'])} bytes of held-out text do not tell a good expert",
            f"Give it more text: two rows of {context} bytes at least, of a tenth of it in three parts.",
        )
    np.save(folder / ROWS_FILE, rows)
    return Text(text.tokens, folder / ROWS_FILE)


def judging(text: HeldOut, context: int) -> npt.NDArray[np.uint8]:
    """The rows of a domain on which its expert is evaluated, [rows, context + 1]."""
    rows = rows_of(text.texts["dev"], context)
    return np.asarray(rows[np.linspace(0, len(rows) - 1, min(len(rows), MOST_ROWS)).astype(int)])


def main() -> None:
    """Print the result for `read_text`."""
    die_with_parent()
    job, context, folder = sys.argv[1:]
    try:
        found = checked_text(ExpertJob.model_validate_json(job), int(context), Path(folder))
    except PierError as error:
        print(json.dumps({"problem": error.problem, "remedy": error.remedy}))
    else:
        print(json.dumps({"tokens": found.tokens}))


if __name__ == "__main__":
    main()
