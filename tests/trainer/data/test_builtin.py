from __future__ import annotations

from pathlib import Path

import pytest

from pier_node.base.errors import PierError
from pier_node.trainer.data import sources
from pier_node.trainer.data.documents import Entry
from pier_node.trainer.data.sources import BUILTIN_PIECE, FAMILIES, builtin_source, split

CODE = '''"""The module, café."""
import os
def plain(): return "kept"
class Thing:
    """Of the class.

    More."""
    if os.name:
        async def inner(self):
            'of a method'; return "also kept"
text = """no docstring"""
'''


def test_docstrings_are_cut_out_and_kept_by_themselves() -> None:
    docstrings, rest = split(CODE)
    assert docstrings == '"""The module, café."""\n"""Of the class.\n\n    More."""\n\'of a method\''
    assert all(kept in rest for kept in ('return "kept"', '; return "also kept"', '"""no docstring"""', "import os"))
    assert not any(cut in rest for cut in ("café", "of the class", "of a method"))
    assert len(docstrings) + len(rest) == len(CODE) + 2, "two line ends between three docstrings"


@pytest.mark.parametrize("code", ["", "x = (", "print 'old'", "\n\n# a comment"])
def test_what_has_none_or_is_no_python_is_all_rest(code: str) -> None:
    assert split(code) == ("", code)


def test_there_are_enough_unlike_domains() -> None:
    assert len(FAMILIES) >= 6
    with pytest.raises(PierError):
        builtin_source("cooking")


def test_families_hold_files_of_their_own() -> None:
    files = {name: {entry.name for entry in builtin_source(name).entries} for name in FAMILIES}
    for name, own in files.items():
        assert own, name
        for other, others in files.items():
            assert name == other or "docstrings" in (name, other) or own.isdisjoint(others)


@pytest.mark.parametrize("name", ["topics", "numbers"])
def test_documents_are_pieces_with_names_of_their_own(name: str) -> None:
    documents = [*builtin_source(name).documents()]
    assert len({document.name for document in documents}) == len(documents)
    assert sum(len(document.text) for document in documents) > 200_000


def test_source_and_docstrings_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "numbers.py"
    path.write_text(CODE + "x = 1\n" * BUILTIN_PIECE)
    monkeypatch.setattr(sources, "stdlib_entries", lambda: [Entry("random.py", path)])
    source, docstrings = ([*builtin_source(name).documents()] for name in ("numbers", "docstrings"))
    assert [document.name for document in source] == [f"random.py#{number}" for number in range(len(source))]
    assert len(source) > 1
    assert "".join(document.text for document in source) == split(path.read_text())[1]
    assert "".join(document.text for document in docstrings) == split(path.read_text())[0]
