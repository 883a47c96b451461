"""Built-in domains: parts of Python's own library that every machine has, unlike enough to need unlike experts.

Source code by package family, without its docstrings; these by themselves; and the prose of `help()`. No text is in two
domains. It depends on the Python version, so that whoever uses it compares hashes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from pier_node.data.files import Document, Entry
from pier_node.data.sources import Source
from pier_node.data.stdlib import TOPICS, read_stdlib, stdlib_entries
from pier_node.data.text import read_text
from pier_node.errors import PierError

SOURCE = {
    "network": "email http urllib xmlrpc wsgiref ftplib imaplib smtplib poplib nntplib telnetlib socket ssl",
    "formats": "json xml csv configparser plistlib tomllib html zipfile tarfile gzip pickle pickletools base64 mailbox",
    "concurrency": "asyncio concurrent multiprocessing threading queue subprocess selectors sched signal contextlib",
    "numbers": "_pydecimal decimal fractions statistics random _pydatetime datetime calendar zoneinfo heapq bisect",
    "encodings": "encodings",
    "tools": "ast dis inspect pdb bdb trace doctest pydoc argparse optparse logging unittest importlib typing",
}
"""Families of source code, and the packages and modules that belong to them."""
PROSE = ("topics", "docstrings")
FAMILIES = (*PROSE, *SOURCE)
"""Names of all built-in domains."""

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Span = tuple[tuple[int, int], tuple[int, int]]
"""First and last place in a text: its line, from 1, and its column in bytes."""

PIECE = 8192
"""Characters of a document; it ends with a line."""


def builtin_source(family: str) -> Source:
    """The documents of a built-in domain. Raises PierError: there is none of that name."""
    if family not in FAMILIES:
        raise PierError(f"there is no built-in domain {family!r}", f"Choose one of {', '.join(FAMILIES)}.")
    if family == "topics":
        return Source([entry for entry in stdlib_entries() if entry.name == TOPICS], read_stdlib)
    if family == "docstrings":
        return Source([entry for name in SOURCE for entry in _entries(name)], _read_docstrings)
    return Source(_entries(family), _read_code)


def split(code: str) -> tuple[str, str]:
    """The docstrings of a module, and the rest of its text; all of it is rest when it cannot be parsed."""
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
    """Where they begin and end."""
    spans: list[Span] = []
    waiting: list[Any] = [tree]
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, DOCUMENTED) and holder.body and isinstance(holder.body[0], ast.Expr):
            text = holder.body[0].value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                spans.append(((text.lineno, text.col_offset), (text.end_lineno or 0, text.end_col_offset or 0)))
        # Only statements hold classes and functions: most of a tree is expressions.
        for inside in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(holder, inside, [])
    return spans


def _entries(family: str) -> list[Entry]:
    names = {*SOURCE[family].split()}
    return [entry for entry in stdlib_entries() if entry.name.split("/")[0].removesuffix(".py") in names]


def _read_code(entry: Entry) -> Iterator[Document]:
    return _cut(entry, split(_text(entry))[1])


def _read_docstrings(entry: Entry) -> Iterator[Document]:
    return _cut(entry, split(_text(entry))[0])


def _text(entry: Entry) -> str:
    return "".join(document.text for document in read_text(entry))


def _cut(entry: Entry, text: str) -> Iterator[Document]:
    """Pieces that end where a line does."""
    number = 0
    while text:
        end = text.find("\n", PIECE) + 1 or len(text)
        yield Document(f"{entry.name}#{number}", text[:end])
        text, number = text[end:], number + 1
