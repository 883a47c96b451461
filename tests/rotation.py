"""The slow tests in parts that take about as long as each other. CI runs one part, which the commit chooses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

SECONDS = Path(__file__).with_name("seconds.txt")
USUAL = 10.0
"""Seconds of a file that seconds.txt does not list."""


class Test(Protocol):
    """What the choice looks at: a pytest.Item has it."""

    @property
    def location(self) -> tuple[str, int | None, str]: ...

    def get_closest_marker(self, name: str) -> object | None: ...


AnyTest = TypeVar("AnyTest", bound=Test)


@dataclass(frozen=True)
class Part:
    """One of so many parts, counted from 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """As in 2/8. Raises ValueError."""
        number, _, of = text.partition("/")
        part = cls(int(number), int(of))
        if not 1 <= part.number <= part.of:
            raise ValueError(f"{text}: there is no such part; the first of eight is 1/8")
        return part


def known_seconds() -> dict[str, float]:
    """What seconds.txt says of files, by their paths."""
    rows = (line.split() for line in SECONDS.read_text().splitlines() if not line.startswith("#"))
    return {path: float(seconds) for seconds, path in rows}


def spread(files: Collection[str], seconds: Mapping[str, float], parts: int) -> list[set[str]]:
    """Each file in one part: the longest first, always into the part that is shortest so far."""
    made: list[set[str]] = [set() for _ in range(parts)]
    filled = [0.0] * parts
    for file in sorted(set(files), key=lambda file: (-seconds.get(file, USUAL), file)):
        shortest = filled.index(min(filled))
        made[shortest].add(file)
        filled[shortest] += seconds.get(file, USUAL)
    return made


def in_part(tests: Sequence[AnyTest], part: Part) -> list[AnyTest]:
    """The quick tests, the smokes, and of the other slow tests those of this part. Files stay whole."""

    def rotates(test: AnyTest) -> bool:
        return bool(test.get_closest_marker("slow")) and not test.get_closest_marker("smoke")

    files = {test.location[0] for test in tests if rotates(test)}
    chosen = spread(files, known_seconds(), part.of)[part.number - 1]
    return [test for test in tests if not rotates(test) or test.location[0] in chosen]
