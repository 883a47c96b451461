"""source = "hf": a folder of files as a data set of the `datasets` library, which is streamed; no network."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pier_node.base.errors import PierError
from pier_node.config.run import DataSection
from pier_node.trainer.data.corpus import open_corpus
from pier_node.trainer.data.sources import VALIDATION, HubSource, open_source
from pier_node.trainer.data.tokenizing import Text

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")


def make(folder: Path, shards: int, rows: int = 4) -> Path:
    folder.mkdir()
    for shard in range(shards):
        lines = [json.dumps({"text": f"<{shard}.{row}>", "number": row}) + "\n" for row in range(rows)]
        (folder / f"part-{shard:03}.jsonl").write_text("".join(lines))
    return folder


def source_of(folder: Path, **keys: Any) -> HubSource:
    source = open_source(DataSection(source="hf", path=str(folder), **keys))
    assert isinstance(source, HubSource)
    return source


def test_rows_are_documents_with_names_that_are_the_same_everywhere(tmp_path: Path) -> None:
    source = source_of(make(tmp_path / "set", 3))
    found = [(document.name, document.text) for document in source.documents()]
    assert found == [(f"{s:05}:{r}", f"<{s}.{r}>") for s in range(3) for r in range(4)]


def test_a_site_reads_only_its_own_shards_and_those_for_validation(tmp_path: Path) -> None:
    source = source_of(make(tmp_path / "set", 8))
    opened: list[str] = []

    def reading(entry: Any) -> Iterator[Any]:
        opened.append(entry.name)
        return source.read(entry)

    watched = HubSource(source.entries, reading, source.version)
    parts = {slot: list(watched.parts(0.125, slot, 3)) for slot in range(3)}
    assert opened == ["00000", "00001", "00004", "00007", "00000", "00002", "00005", "00000", "00003", "00006"]
    held_out = [[text.text for part, text in parts[slot] if part == VALIDATION] for slot in range(3)]
    assert held_out == [[f"<0.{row}>" for row in range(4)]] * 3
    trained = sorted(text.text for slot in range(3) for part, text in parts[slot] if part == slot)
    assert trained == sorted(f"<{shard}.{row}>" for shard in range(1, 8) for row in range(4))


@pytest.mark.parametrize(("slots", "limit"), [(3, 0), (1, 0), (1, 10)])
def test_documents_are_dealt_if_there_are_too_few_shards_or_a_limit(tmp_path: Path, slots: int, limit: int) -> None:
    config = DataSection(source="hf", path=str(make(tmp_path / "set", 3)), validation=0.125, limit=limit)
    corpora = [open_corpus(config, slot, slots, None, tmp_path / "cache") for slot in range(slots)]
    held_out = bytes(np.asarray(corpora[0].validation)).decode().split()
    trained = [text for corpus in corpora for text in bytes(np.asarray(corpus.train)).decode().split()]
    rows = [f"<{shard}.{row}>" for shard in range(3) for row in range(4)]
    assert sorted(trained + held_out) == sorted(rows[: limit or None])


def test_another_version_of_the_data_set_makes_another_cache(tmp_path: Path) -> None:
    config = DataSection(source="hf", path=str(make(tmp_path / "set", 2)))
    key = Text.of(config, 0, 1, None).key()
    assert Text.of(config, 0, 1, None).key() == key
    (tmp_path / "set" / "part-000.jsonl").write_text('{"text": "other", "number": 1}\n')
    assert Text.of(config, 0, 1, None).key() != key


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"path": "/nowhere/at/all"}, "Couldn't find any data file"),
        ({"split": "tset"}, "tset"),
        ({"subset": "other"}, "other"),
        ({"text_field": "body"}, 'no column "body"'),
        ({"text_field": "number"}, 'column "number" is not text'),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, keys: dict[str, str], words: str) -> None:
    given: dict[str, Any] = {"path": str(make(tmp_path / "set", 1)), **keys}
    with pytest.raises(PierError, match=words) as caught:
        list(open_source(DataSection(source="hf", **given)).documents())
    assert "[data]" in caught.value.remedy
    assert f'data set "{given["path"]}"' in caught.value.problem


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PierError, match="needs datasets") as caught:
        open_source(DataSection(source="hf", path="some/name"))
    assert "scripts/install datasets" in caught.value.remedy
