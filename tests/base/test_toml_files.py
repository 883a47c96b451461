from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BaseModel, ConfigDict, Field

from pier_node.base.errors import PierError
from pier_node.base.toml import read_toml, validated, write_new


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: Annotated[int, Field(ge=1)] = 1


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    one: Inner = Inner()
    many: tuple[Inner, ...] = ()


def test_tables_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[one]\nsize = 2\n[[many]]\n[[many]]\nsize = 3\n")
    found = validated(read_toml(path, "make"), Outer, str(path))
    assert (found.one.size, [each.size for each in found.many]) == (2, [1, 3])


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"one": {"size": 0}}, "one.size = 0: Input should be greater than or equal to 1"),
        ({"many": [{}, {"size": 0}]}, "many.1.size = 0"),
        ({"one": {"seize": 1}}, "one.seize: no such key; allowed here: size"),
        ({"many": [{"seize": 1}]}, "many.0.seize: no such key; allowed here: size"),
        ({"none": 1}, "none: no such key; allowed here: one, many"),
    ],
)
def test_every_wrong_key_is_named_with_its_place_in_a_list(tables: dict[str, object], said: str) -> None:
    with pytest.raises(PierError) as caught:
        validated(tables, Outer, "a.toml")
    assert caught.value.problem.startswith("a.toml:\n  ")
    assert said in caught.value.problem


def test_a_file_may_begin_with_a_byte_order_mark_and_is_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(b'\xef\xbb\xbfname = "caf\xc3\xa9"\n')
    assert read_toml(path, "make") == {"name": "café"}


def test_who_makes_such_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PierError, match="Write one with: make it"):
        read_toml(tmp_path / "none.toml", "make it")
    for content in (b"a = [", b"\xff\xfe"):
        (tmp_path / "b.toml").write_bytes(content)
        with pytest.raises(PierError, match="not TOML") as caught:
            read_toml(tmp_path / "b.toml", "make it")
        assert "`make it`" in caught.value.remedy


def test_what_people_wrote_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    write_new(path, "old", force=False)
    with pytest.raises(PierError, match="exists"):
        write_new(path, "new", force=False)
    assert path.read_text() == "old"
    write_new(path, "new", force=True)
    assert path.read_text() == "new"


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(PierError, match="No such file or directory"):
        write_new(tmp_path / "missing" / "a.toml", "", force=False)
