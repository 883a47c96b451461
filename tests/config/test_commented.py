"""What run_toml and experts_toml have in common; commands/test_init.py has the rest."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from pier_node.config.commented import Notes, commented, run_toml
from pier_node.config.presets import PRESETS
from pier_node.config.run import RunConfig, load


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

    shown = "\n".join(commented(Follows(), Notes(decides={"cafe": {"kind": ("tea", "coffee")}})))
    assert "\nprice = 1.5" in shown, "it is the same for both"


def keys_of(kind: type[BaseModel], name: str = "") -> Iterator[tuple[str, str]]:
    """(section, key) of every key, those of sections in sections after the others."""
    inside = {}
    for key, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            inside[f"{name}.{key}".strip(".")] = field.annotation
        else:
            yield name, key
    for section, part in inside.items():
        yield from keys_of(part, section)


FILLED_IN = [("", "program"), ("model", "transformers")]
"""By a program, and by `pier-node init --from`."""
KEYS = [key for key in keys_of(RunConfig) if key not in FILLED_IN]

DEFAULTS = run_toml()


def uncommented(text: str) -> str:
    """With what follows from other keys made explicit."""
    return re.sub(r"^#(?=\w+ = )", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("preset", PRESETS)
def test_it_is_the_defaults_of_a_preset(tmp_path: Path, preset: str) -> None:
    defaults = RunConfig.model_validate({"model": {"preset": preset}})
    for text in (run_toml({"model": {"preset": preset}}), uncommented(run_toml({"model": {"preset": preset}}))):
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        assert load(path) == defaults


def test_without_a_preset_it_is_what_an_empty_file_means() -> None:
    assert RunConfig.model_validate(tomllib.loads(run_toml())) == RunConfig()


def test_every_key_of_every_section_is_shown() -> None:
    tables = tomllib.loads(uncommented(run_toml()))
    found = [
        (f"{name}.{key}", inner) if isinstance(value, dict) else (name, key)
        for name, keys in tables.items()
        for key, value in keys.items()
        for inner in (value if isinstance(value, dict) else [key])
    ]
    assert found == KEYS


@pytest.mark.parametrize(("section", "key"), KEYS, ids=lambda part: str(part))
def test_every_key_is_explained(section: str, key: str) -> None:
    """By a sentence that is more than what is allowed."""
    part = DEFAULTS.partition(f"[{section}]\n")[2].partition("\n[")[0]
    about = re.search(rf"((?:^# .*\n)+)#?{key} = ", part, re.MULTILINE)
    assert about
    assert len(about[1].removeprefix("# ").partition("[")[0]) > 5, (
        f"{section}.{key}: config/run.py does not say what it means"
    )


def test_bounds_are_those_of_the_models() -> None:
    text = " ".join(run_toml().replace("#   ", "").split())
    assert "[one of pier, diloco, noloco, sync] algorithm =" in text
    assert "[1 or more, 1024 or less] sites = 1" in text
    assert "[above 0.0, 0.5 or less] validation = 0.02" in text
    assert "[true or false] pretrained = false" in text
    assert '[one of auto, true, false] compile = "auto"' in text
    assert f"[one of {', '.join(PRESETS)}] preset =" in text


def test_what_follows_from_the_preset_the_algorithm_or_the_codec_can_be_left_to_it() -> None:
    """Else another preset, or algorithm, chosen in the file would change nothing."""
    for old, new, tables in (
        ('preset = "llama-1m"', 'preset = "gpt2-small"', {"model": {"preset": "gpt2-small"}}),
        ('algorithm = "pier"', 'algorithm = "diloco"', {"outer": {"algorithm": "diloco"}}),
        ('algorithm = "pier"', 'algorithm = "noloco"', {"outer": {"algorithm": "noloco"}}),
        ('\ncodec = "none"', '\ncodec = "topk"', {"outer": {"codec": "topk"}}),
    ):
        changed = run_toml().replace(old, new)
        assert RunConfig.model_validate(tomllib.loads(changed)) == RunConfig.model_validate(tables)


def test_no_comment_sends_its_reader_to_the_source_code() -> None:
    assert not re.findall(r"\S+\.py\b", run_toml())


def test_lines_are_of_a_width_that_people_read() -> None:
    prose = [line for line in run_toml().splitlines() if line.startswith("# ")]
    assert max(len(line) for line in prose) <= 112
