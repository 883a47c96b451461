"""Which slow tests a commit runs: each is in exactly one part, and the parts take about as long as each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rotation import USUAL, Part, in_part, known_seconds, spread

FILES = st.sets(st.text("abc", min_size=1, max_size=4), max_size=30)
SECONDS = st.dictionaries(st.text("abc", min_size=1, max_size=4), st.floats(0.0, 300.0))


@given(FILES, SECONDS, st.integers(1, 5))
def test_each_file_is_in_one_part_and_no_part_is_longer_than_another_by_more_than_a_file(
    files: set[str], seconds: dict[str, float], count: int
) -> None:
    parts = spread(files, seconds, count)
    assert len(parts) == count
    assert sorted(file for part in parts for file in part) == sorted(files)
    filled = [sum(seconds.get(file, USUAL) for file in part) for part in parts]
    longest = max((seconds.get(file, USUAL) for file in files), default=0.0)
    assert max(filled) - min(filled) <= longest + 1e-6


def test_the_order_of_the_files_does_not_matter() -> None:
    files = [f"test_{number}.py" for number in range(20)]
    assert spread(files, {"test_3.py": 99.0}, 4) == spread(files[::-1], {"test_3.py": 99.0}, 4)


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "one/4", ""])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"part|int"):
        Part.parse(text)


def test_every_file_whose_seconds_are_known_exists() -> None:
    root = Path(__file__).parents[1]
    assert [path for path in known_seconds() if not (root / path).exists()] == []


class Collected:
    """What a collected test says of itself, as far as the choice goes."""

    def __init__(self, file: str, *marks: str) -> None:
        self.location, self._marks = (file, 1, "test"), marks

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self._marks else None


def test_smokes_and_quick_tests_are_in_every_part_and_the_others_in_one() -> None:
    quick, smoke = Collected("a.py"), Collected("b.py", "slow", "smoke")
    slow = [Collected(f"{name}.py", "slow") for name in "bcdefgh"]
    parts = [in_part([quick, smoke, *slow], Part(number, 3)) for number in (1, 2, 3)]
    assert all(part[:2] == [quick, smoke] for part in parts)
    assert sorted(test.location[0] for part in parts for test in part[2:]) == [test.location[0] for test in slow]
