from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from pier_node.config.commented import MEANINGS, run_toml
from pier_node.config.presets import PRESETS
from pier_node.config.run import RunConfig, load


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


KEYS = [key for key in keys_of(RunConfig) if key != ("", "program")]  # a program fills that in

DEFAULTS = run_toml()


def uncommented(text: str) -> str:
    """With what follows from other keys made explicit."""
    return re.sub(r"^#(?=\w+ = )", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("preset", PRESETS)
def test_it_is_the_defaults_of_a_preset(tmp_path: Path, preset: str) -> None:
    defaults = RunConfig.model_validate({"model": {"preset": preset}})
    for text in (run_toml(preset), uncommented(run_toml(preset))):
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


def test_meanings_are_of_keys_that_exist() -> None:
    assert set(MEANINGS) <= {f"{section}.{key}" for section, key in KEYS}


def test_bounds_are_those_of_the_models() -> None:
    text = " ".join(run_toml().replace("#   ", "").split())
    assert "[one of pier, diloco, noloco, sync] algorithm =" in text
    assert "[1 or more, 1024 or less] sites = 1" in text
    assert "[above 0.0, 0.5 or less] validation = 0.02" in text
    assert "[true or false] compile = false" in text
    assert f"[one of {', '.join(PRESETS)}] preset =" in text


def test_what_follows_from_the_preset_or_the_algorithm_can_be_left_to_it() -> None:
    """Else another preset, or algorithm, chosen in the file would change nothing."""
    for old, new, tables in (
        ('preset = "llama-1m"', 'preset = "gpt2-small"', {"model": {"preset": "gpt2-small"}}),
        ('algorithm = "pier"', 'algorithm = "diloco"', {"outer": {"algorithm": "diloco"}}),
        ('algorithm = "pier"', 'algorithm = "noloco"', {"outer": {"algorithm": "noloco"}}),
    ):
        changed = run_toml().replace(old, new)
        assert RunConfig.model_validate(tomllib.loads(changed)) == RunConfig.model_validate(tables)


def test_lines_are_of_a_width_that_people_read() -> None:
    prose = [line for line in run_toml().splitlines() if line.startswith("# ")]
    assert max(len(line) for line in prose) <= 112
