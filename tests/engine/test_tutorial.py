"""docs/program.md quotes the examples: every line that it shows of one is in it, in that order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.stem != "common")
QUOTED = dict(
    re.findall(r"\[(\w+)\.py\]\(\.\./examples.*?```python\n(.*?)```", (ROOT / "docs/program.md").read_text(), re.DOTALL)
)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_tutorial_of_an_example_quotes_it(example: str) -> None:
    quoted = QUOTED[example].splitlines()
    assert 2 <= len(quoted) <= 8
    code = iter((ROOT / "examples" / f"{example}.py").read_text().splitlines())
    assert [line for line in quoted if line not in code] == []  # `in` continues from where it found the line before
