"""The embedded corpus: Python's own standard library, source code and the prose of `help()`.

The same at two machines with the same Python version: tests, parts that distributions package apart, and files that
describe one machine are left out. Some 10 MB remain.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from pier_node.data.files import Document, Entry, find_entries
from pier_node.data.text import read_text

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
    """The documents of one file; the file of help topics gives one document a topic, as it reads on the screen."""
    if entry.name == TOPICS:
        from pydoc_data.topics import topics

        return (Document(f"{TOPICS}:{name}", text) for name, text in sorted(topics.items()))
    return read_text(entry)
