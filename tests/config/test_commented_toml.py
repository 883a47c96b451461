"""What run_toml and experts_toml have in common; test_run_toml.py has the rest."""

from __future__ import annotations

import tomllib
from typing import Literal

from pydantic import BaseModel, Field

from pier_node.config.commented import Notes, commented


class Place(BaseModel):
    """[[places]]: where it is."""

    name: str
    """What people call it,
    and nobody else."""
    seats: int = 4
    open: tuple[str, ...] = ()


class Cafe(BaseModel):
    """[cafe]: what it is."""

    kind: Literal["tea", "coffee"] = "tea"
    price: float = 1.5
    """In coins."""


class File(BaseModel):
    """All of it."""

    cafe: Cafe = Cafe()
    places: tuple[Place, ...] = Field(default=(Place(name="Ørestad"), Place(name="b", seats=2, open=("mon", "tue"))))


def text(file: File, notes: Notes | None = None) -> str:
    return "\n".join(commented(file, notes or Notes()))


def test_what_is_written_is_what_was_meant() -> None:
    assert File.model_validate(tomllib.loads(text(File()))) == File()


def test_the_first_of_a_list_is_explained_and_the_others_say_what_is_theirs() -> None:
    first, second = text(File()).split("[[places]]\n")[1:]
    assert "# What people call it, and nobody else.\n" in first
    assert "seats = 4" in first
    assert second.strip() == 'name = "b"\nseats = 2\nopen = ["mon", "tue"]'


def test_an_empty_list_is_left_out() -> None:
    assert "places" not in text(File(places=()))


def test_meanings_are_of_the_model_or_of_the_notes() -> None:
    shown = text(File(), Notes({"cafe.kind": "What it sells."}))
    assert "# What it sells. [one of tea, coffee]\nkind" in shown
    assert "# In coins.\nprice = 1.5" in shown
    assert "# [cafe]: what it is.\n[cafe]" in shown


def test_what_follows_from_no_key_is_no_comment() -> None:
    class Follows(BaseModel):
        cafe: Cafe = Cafe()

    shown = "\n".join(commented(Follows(), Notes(decides={"cafe": ("kind", ("tea", "coffee"))})))
    assert "\nprice = 1.5" in shown, "it is the same for both"
