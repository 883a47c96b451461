from __future__ import annotations

import time
from pathlib import Path

import pytest

from pier_node.config.run import DataSection
from pier_node.trainer.data.corpus import open_corpus
from pier_node.trainer.data.documents import Document
from pier_node.trainer.data.sources import TOPICS, read_stdlib, stdlib_entries


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return [document for entry in stdlib_entries() for document in read_stdlib(entry)]


def test_it_is_about_10_mb_of_python(documents: list[Document]) -> None:
    assert 7e6 < sum(len(document.text) for document in documents) < 20e6
    names = [document.name for document in documents]
    assert "json/decoder.py#0" in names
    assert len(set(names)) == len(names)


def test_help_topics_read_as_on_the_screen(documents: list[Document]) -> None:
    [topic] = [document.text for document in documents if document.name == f"{TOPICS}:with"]
    assert topic.startswith('The "with" statement\n')
    assert not any(document.name.startswith(f"{TOPICS}#") for document in documents)


def test_nothing_is_of_one_machine_or_packaged_apart(documents: list[Document]) -> None:
    parts = {part for document in documents for part in Path(document.name.split("#")[0]).parts}
    assert parts.isdisjoint({"site-packages", "test", "tests", "idle_test", "lib2to3", "tkinter", "sitecustomize.py"})
    assert not any(part.startswith(("_sysconfigdata", "config-")) for part in parts)


def test_three_slots_share_more_than_5_mb_and_open_soon(tmp_path: Path) -> None:
    start = time.process_time()
    corpora = [open_corpus(DataSection(), slot, 3, None, tmp_path) for slot in range(3)]
    assert time.process_time() - start < 20, "seconds of this process's own, on any machine"
    assert sum(len(corpus.train) for corpus in corpora) > 5e6
    assert min(len(corpus.train) for corpus in corpora) > 1.5e6
    assert min(len(corpus.validation) for corpus in corpora) > 5e4
