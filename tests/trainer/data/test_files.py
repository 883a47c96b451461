from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pier_node.base.errors import PierError
from pier_node.trainer.data.documents import Entry, find_entries


def write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")


def names_of(entries: list[Entry]) -> list[str]:
    return [entry.name for entry in entries]


def test_a_file_has_no_name_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "some.txt")
    assert find_entries(tmp_path / "some.txt") == [Entry("", tmp_path / "some.txt")]


def test_a_folder_is_walked_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path, "b.txt", "a/z.txt", "a/b/c.md", "c")
    assert names_of(find_entries(tmp_path)) == ["a/b/c.md", "a/z.txt", "b.txt", "c"]


def test_names_do_not_depend_on_where_the_folder_is(tmp_path: Path) -> None:
    write(tmp_path / "here", "a/b.txt")
    write(tmp_path / "elsewhere" / "deeper", "a/b.txt")
    assert names_of(find_entries(tmp_path / "here")) == names_of(find_entries(tmp_path / "elsewhere" / "deeper"))


def test_hidden_broken_and_unwanted_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, ".git/config", ".hidden", "seen.py", "seen.txt", "test/seen.py")
    (tmp_path / "broken.py").symlink_to(tmp_path / "nowhere")
    assert names_of(find_entries(tmp_path, ".py", frozenset({"test"}))) == ["seen.py"]


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(PierError, match=r"nowhere: no such file or folder") as caught:
        find_entries(tmp_path / "nowhere")
    assert "--dataset PATH" in caught.value.remedy


@pytest.mark.parametrize(("suffix", "said"), [("", "no visible file"), (".jsonl", "no .jsonl file")])
def test_a_folder_without_a_file_is_an_error(tmp_path: Path, suffix: str, said: str) -> None:
    write(tmp_path, ".hidden")
    with pytest.raises(PierError, match=said):
        find_entries(tmp_path, suffix)


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PierError, match=f"{tmp_path}: Permission denied"):
        find_entries(tmp_path)
