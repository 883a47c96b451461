"""Documents: (name, text) pairs that the source and path of [data] give in one fixed order, and who trains on them.

The part of a document, a slot's or the validation's, depends only on its name and its text, through BLAKE2b, and no
name depends on where a site keeps its files. So sites with the same data agree without communication, and additional
data moves no document. The sources:

- text: any UTF-8 file, cut into documents at line ends so that one file can be divided among many sites.
- jsonl: one JSON object per line, with the text in one field.
- parquet: one row per document, with the text in one column. It needs pyarrow, an optional dependency.
- hf: one row per document of a data set of the `datasets` library, an optional dependency. It is streamed, not
  downloaded first. If it has enough shards, whole shards are dealt, so that a site reads no others.
- stdlib: Python's own standard library: source code and the prose of `help()`, about 10 MB. It is the same on two
  machines with the same Python version: tests, parts that distributions package separately, and files that describe
  one machine are left out.
- builtin: domains cut from the standard library, different enough to need different experts: source code by package
  family without docstrings, the docstrings themselves, and the prose of `help()`. No text is in two domains. The text
  depends on the Python version, so its users compare hashes.
"""

from __future__ import annotations

import ast
import codecs
import hashlib
import json
import logging
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pier_node.base.errors import PierError
from pier_node.config.run import SourceSection


class Document(NamedTuple):
    """A piece of text that is assigned as a whole. Its name is unique in its source and the same at every site."""

    name: str
    text: str


class Entry(NamedTuple):
    """A file and its path below the data set's folder; the name is empty if the data set is that one file."""

    name: str
    path: Path


def find_entries(root: Path, suffix: str = "", left_out: frozenset[str] = frozenset()) -> list[Entry]:
    """The file `root`, or all files with this suffix in the folder `root` and below, sorted by name.

    Hidden files and folders, and those named in `left_out`, are skipped.

    Raises:
        PierError: it is no file or folder, a folder cannot be read, or it contains no file.
    """
    if root.is_file():
        return [Entry("", root)]
    if not root.is_dir():
        problem = "neither a file nor a folder" if root.exists() else "no such file or folder"
        raise PierError(f"data path {root}: {problem}", "Correct [data] path, or give --dataset PATH.")
    remedy = "Put the data there, correct [data] path, or give --dataset PATH."
    found = (path for path in _walk(root, left_out) if path.name.endswith(suffix) and path.is_file())
    entries = sorted(Entry(path.relative_to(root).as_posix(), path) for path in found)
    if not entries:
        raise PierError(f"data path {root}: the folder has no {suffix or 'visible'} file", remedy)
    return entries


def _walk(root: Path, left_out: frozenset[str]) -> Iterator[Path]:
    def counts(name: str) -> bool:
        return not name.startswith(".") and name not in left_out

    for folder, below, names in os.walk(root, onerror=_refuse):
        below[:] = filter(counts, below)
        yield from (Path(folder, name) for name in filter(counts, names))


def _refuse(error: OSError) -> None:
    raise PierError(f"{error.filename}: {error.strerror}", "Make the folder readable, or move it away.") from error


VALIDATION = -1
"""The part that no site trains on."""
HELD_OUT = 0.1
"""The fraction of a domain's documents that no expert trains on."""

Split = Literal["dev", "prior", "test"]
"""The uses of a domain's held-out documents: to accept an expert, to fit the prior of a mixture, and to score it."""
SPLITS: tuple[Split, ...] = get_args(Split)


def part_of(document: Document, validation: float, slots: int) -> int:
    """The slot, 0..slots-1, that trains on a document; VALIDATION for about the fraction `validation` of documents."""
    name, text = document.name.encode(errors="surrogateescape"), document.text.encode()
    digest = hashlib.blake2b(b"%b\0%b" % (name, text), digest_size=16).digest()
    if int.from_bytes(digest[:8], "big") < int(validation * 2**64):
        return VALIDATION
    return int.from_bytes(digest[8:], "big") % slots


PIECE = 1 << 16
"""Characters in a document cut from a longer file; its last line is completed up to as many again."""
SMALLEST_PIECE = 1 << 12
PIECES = 256
"""A data set of one short file is cut more finely, into about this many documents, so that every site gets some."""
CHUNK = 1 << 20

log = logging.getLogger(__name__)


def read_text(entry: Entry) -> Iterator[Document]:
    """The documents of a text file. A file of a folder that is not UTF-8 text is skipped with a warning.

    Raises:
        PierError: the data set is this one file, and it is not UTF-8 text.
    """
    bad_line = first_bad_line(entry.path)
    if bad_line is None:
        finer = min(max(entry.path.stat().st_size // PIECES, SMALLEST_PIECE), PIECE)
        yield from cut(entry, PIECE if entry.name else finer)
    elif entry.name:
        log.warning("%s, line %d: not UTF-8 text; the file is left out", entry.path, bad_line)
    else:
        raise PierError(f"{entry.path}, line {bad_line}: not UTF-8 text", "Convert the file to UTF-8, or remove it.")


def cut(entry: Entry, piece: int) -> Iterator[Document]:
    """Documents of `piece` characters extended to the next line end, at most twice as long."""
    with entry.path.open(encoding="utf-8", newline="") as file:
        number = 0
        while text := file.read(piece):
            yield Document(f"{entry.name}#{number}", text + file.readline(piece))
            number += 1


def first_bad_line(path: Path) -> int | None:
    """The first line, counted from 1, with a byte that is invalid in UTF-8 text; None if there is none."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            if b"\0" in chunk:
                return line + chunk.count(b"\n", 0, chunk.index(b"\0"))
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as error:
                return line + error.object.count(b"\n", 0, error.start)
            line += chunk.count(b"\n")
    return line if decoder.getstate()[0] else None


def read_jsonl(entry: Entry, field: str) -> Iterator[Document]:
    """One document per line; blank lines are skipped.

    Raises:
        PierError: a line is not a JSON object with text in `field`; the message has its number.
    """
    with entry.path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield Document(f"{entry.name}:{number}", _text(line, field, f"{entry.path}, line {number}"))


def _text(line: bytes, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PierError(f"{where}: not JSON: {error}", "Each line must be one JSON object in UTF-8.") from error
    if not isinstance(record, dict):
        raise PierError(f"{where}: not a JSON object", "Each line must be one JSON object.")
    if field not in record:
        shown = ", ".join(list(record)[:10]) or "none"
        raise PierError(f'{where}: no field "{field}"', f"Set [data] text_field to one of the line's fields: {shown}.")
    if not isinstance(record[field], str):
        raise PierError(f'{where}: field "{field}" is not text', "Set [data] text_field to a string field.")
    # JSON can escape half a surrogate pair, which UTF-8 text cannot contain.
    return str(record[field]).encode(errors="replace").decode()


ROWS = 1024
"""Rows that are decoded in one batch."""


def read_parquet(entry: Entry, field: str) -> Iterator[Document]:
    """One document per row; rows without a value are skipped.

    Raises:
        PierError: pyarrow is missing, the file is not Parquet or damaged, or it has no text column of that name.
    """
    number = 0
    with _open(entry, field) as file:
        try:
            for batch in file.iter_batches(ROWS, columns=[field]):
                for text in batch.column(0).to_pylist():
                    if text is not None:
                        yield Document(f"{entry.name}:{number}", text)
                    number += 1
        except ValueError as error:
            raise PierError(
                f"{entry.path}: damaged, or not UTF-8 text: {error}", "Replace it, or remove it."
            ) from error


def _open(entry: Entry, field: str) -> Any:
    try:
        arrow, parquet = (import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    except ImportError as error:
        raise PierError(
            'data source "parquet" needs pyarrow', "In the clone of Pier: scripts/install parquet"
        ) from error
    try:
        file = parquet.ParquetFile(entry.path)
    except arrow.ArrowInvalid as error:
        raise PierError(f"{entry.path}: not a Parquet file: {error}", "Replace it, or remove it.") from error
    schema = file.schema_arrow
    if field not in schema.names:
        shown = ", ".join(schema.names[:10])
        raise PierError(f'{entry.path}: no column "{field}"', f"Set [data] text_field to one of its columns: {shown}.")
    kind = schema.field(field).type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise PierError(f'{entry.path}: column "{field}" holds {kind}, not text', "Set [data] text_field to another.")
    return file


LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "sitecustomize.py"}
    | {"idlelib", "tkinter", "turtledemo", "distutils", "lib2to3", "ensurepip"}
)
OF_THIS_MACHINE = ("_sysconfigdata", "config-")
TOPICS = "pydoc_data/topics.py"


def stdlib_entries() -> list[Entry]:
    """The files of the standard library that belong to the corpus."""
    found = find_entries(Path(sysconfig.get_path("stdlib")), ".py", LEFT_OUT)
    return [entry for entry in found if not entry.name.startswith(OF_THIS_MACHINE)]


def read_stdlib(entry: Entry) -> Iterator[Document]:
    """The documents of one file. The file of help topics gives one document per topic, as displayed."""
    if entry.name == TOPICS:
        from pydoc_data.topics import topics

        return (Document(f"{TOPICS}:{name}", text) for name, text in sorted(topics.items()))
    return read_text(entry)


SOURCE = {
    "network": "email http urllib xmlrpc wsgiref ftplib imaplib smtplib poplib nntplib telnetlib socket ssl",
    "formats": "json xml csv configparser plistlib tomllib html zipfile tarfile gzip pickle pickletools base64 mailbox",
    "concurrency": "asyncio concurrent multiprocessing threading queue subprocess selectors sched signal contextlib",
    "numbers": "_pydecimal decimal fractions statistics random _pydatetime datetime calendar zoneinfo heapq bisect",
    "encodings": "encodings",
    "tools": "ast dis inspect pdb bdb trace doctest pydoc argparse optparse logging unittest importlib typing",
}
"""Families of source code, and their packages and modules."""
PROSE = ("topics", "docstrings")
FAMILIES = (*PROSE, *SOURCE)
"""Names of all built-in domains."""

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Span = tuple[tuple[int, int], tuple[int, int]]
"""Start and end in a text: line, from 1, and column in bytes."""

BUILTIN_PIECE = 8192
"""Characters of a document, which ends at a line end."""


def builtin_source(family: str) -> Source:
    """The documents of a built-in domain. Raises PierError: there is none of that name."""
    if family not in FAMILIES:
        raise PierError(f"there is no built-in domain {family!r}", f"Choose one of {', '.join(FAMILIES)}.")
    if family == "topics":
        return Source([entry for entry in stdlib_entries() if entry.name == TOPICS], read_stdlib)
    if family == "docstrings":
        return Source([entry for name in SOURCE for entry in _entries(name)], partial(_read_half, half=0))
    return Source(_entries(family), partial(_read_half, half=1))


def split(code: str) -> tuple[str, str]:
    """The docstrings of a module, and the rest of its text. If it cannot be parsed, everything is rest."""
    try:
        spans = _docstrings(ast.parse(code))
    except (SyntaxError, ValueError):
        return "", code
    text, starts = code.encode(), [0]
    for line in text.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    taken, left, done = [], [], 0
    for (row, column), (last, end) in sorted(spans):
        first, past = starts[row - 1] + column, starts[last - 1] + end
        left.append(text[done:first])
        taken.append(text[first:past])
        done = past
    return b"\n".join(taken).decode(), b"".join([*left, text[done:]]).decode()


def _docstrings(tree: ast.Module) -> list[Span]:
    """Start and end of each docstring."""
    spans: list[Span] = []
    waiting: list[Any] = [tree]
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, DOCUMENTED) and holder.body and isinstance(holder.body[0], ast.Expr):
            text = holder.body[0].value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                spans.append(((text.lineno, text.col_offset), (text.end_lineno or 0, text.end_col_offset or 0)))
        # Only statements contain classes and functions: most of a tree is expressions.
        for inside in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(holder, inside, [])
    return spans


def _entries(family: str) -> list[Entry]:
    names = {*SOURCE[family].split()}
    return [entry for entry in stdlib_entries() if entry.name.split("/")[0].removesuffix(".py") in names]


def _read_half(entry: Entry, half: int) -> Iterator[Document]:
    """The documents of a file's docstrings, or (half 1) of its other text: pieces that end at a line end."""
    text, number = split("".join(document.text for document in read_text(entry)))[half], 0
    while text:
        end = text.find("\n", BUILTIN_PIECE) + 1 or len(text)
        yield Document(f"{entry.name}#{number}", text[:end])
        text, number = text[end:], number + 1


@dataclass(frozen=True)
class Source:
    """The files of a data set and the function that reads one of them."""

    entries: list[Entry]
    read: Callable[[Entry], Iterator[Document]]

    def documents(self) -> Iterator[Document]:
        """All non-empty documents, one file after the other. Raises PierError when a file cannot be read."""
        for entry in self.entries:
            try:
                yield from (document for document in self.read(entry) if document.text)
            except OSError as error:
                raise PierError(
                    f"{entry.path}: {error.strerror or error}", "Make the file readable, or remove it."
                ) from error

    def parts(
        self,
        validation: float,
        slot: int,  # noqa: ARG002
        slots: int,
        limit: int = 0,
    ) -> Iterator[tuple[int, Document]]:
        """Documents with the part that each belongs to: all of `slot` and of VALIDATION, and maybe those of others.

        Args:
            validation: fraction of documents that no site trains on.
            limit: only the first so many documents of the data set count; 0: all.
        """
        for document in islice(self.documents(), limit or None):
            yield part_of(document, validation, slots), document

    def size(self) -> int:
        """Bytes in all files; 0: unknown."""
        return sum(entry.path.stat().st_size for entry in self.entries)

    def state(self) -> list[Any]:
        """Differs whenever the data do. Sizes and modification times stand for the content of files."""
        stats = [(str(entry.path.resolve()), entry.name, entry.path.stat()) for entry in self.entries]
        return [(path, name, stat.st_size, stat.st_mtime_ns) for path, name, stat in stats]


@dataclass(frozen=True)
class HubSource(Source):
    """A data set of the `datasets` library; its entries are its shards, which have no path here.

    Attributes:
        version: differs whenever the data set does.
    """

    version: str

    def parts(self, validation: float, slot: int, slots: int, limit: int = 0) -> Iterator[tuple[int, Document]]:
        """See Source. Shards are dealt if there is one for every site, and few enough of them are for validation."""
        held_out = max(1, round(validation * len(self.entries)))
        if limit or held_out > 2 * validation * len(self.entries) or len(self.entries) - held_out < slots:
            yield from super().parts(validation, slot, slots, limit)
            return
        for index, entry in enumerate(self.entries):
            part = VALIDATION if index < held_out else (index - held_out) % slots
            if part in (VALIDATION, slot):
                yield from ((part, document) for document in self.read(entry) if document.text)

    def size(self) -> int:
        """Unknown."""
        return 0

    def state(self) -> list[Any]:
        """See Source."""
        return [self.version]


def open_hub(config: SourceSection, path: str) -> HubSource:
    """A data set of the `datasets` library: a name at its hub, or a folder. Raises PierError."""
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise PierError('data source "hf" needs datasets', "In the clone of Pier: scripts/install datasets") from error
    where, local = f'data set "{path}"', Path(path).expanduser()
    try:
        builder = datasets.load_dataset_builder(str(local) if local.exists() else path, config.subset or None)
        rows = builder.as_streaming_dataset(split=config.split)
    except Exception as error:  # the library raises nothing narrower
        remedy = "Correct [data] path, subset or split. A folder must have files such as .parquet or .jsonl."
        raise PierError(f"{where}: {str(error).strip() or type(error).__name__}", remedy) from error
    shards = [Entry(f"{index:05}", Path(path)) for index in range(rows.num_shards)]

    def read(entry: Entry) -> Iterator[Document]:
        shard = rows.shard(num_shards=len(shards), index=int(entry.name))
        return _hub_documents(shard, entry.name, config.text_field, where)

    return HubSource(shards, read, f"{path} {config.subset} {config.split} {builder.hash}")


def _hub_documents(rows: Iterable[dict[str, Any]], shard: str, field: str, where: str) -> Iterator[Document]:
    found = iter(rows)
    for number in count():
        try:
            row = next(found)
        except StopIteration:
            return
        except Exception as error:  # of the network, or of a file
            remedy = "Start again: what is tokenized already is kept."
            raise PierError(f"{where}, shard {shard}, row {number}: {error}", remedy) from error
        if field not in row:
            remedy = f"Set [data] text_field to one of its columns: {', '.join(list(row)[:10])}."
            raise PierError(f'{where}: no column "{field}"', remedy)
        if row[field] is not None:
            if not isinstance(row[field], str):
                raise PierError(f'{where}: column "{field}" is not text', "Set [data] text_field to another.")
            yield Document(f"{shard}:{number}", row[field].encode(errors="replace").decode())


def no_text() -> PierError:
    """The error of a source without documents."""
    return PierError("the data has no text in it", "Give files with text: [data] path, or --dataset PATH.")


def open_source(config: SourceSection, path: str | None = None) -> Source:
    """The source that [data] describes; `path` replaces its path (and the built-in text) at this site.

    Raises:
        PierError: there is no such path, or no file in it.
    """
    if config.source == "stdlib" and not path:
        return Source(stdlib_entries(), read_stdlib)
    if config.source == "builtin" and not path:
        return builtin_source(config.path)
    if config.source == "hf":
        return open_hub(config, path or config.path)
    root = Path(path or config.path).expanduser()
    if config.source == "jsonl":
        return Source(find_entries(root, ".jsonl"), partial(read_jsonl, field=config.text_field))
    if config.source == "parquet":
        return Source(find_entries(root, ".parquet"), partial(read_parquet, field=config.text_field))
    return Source(find_entries(root), read_text)
