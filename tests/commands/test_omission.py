"""`pier-node evaluate --skip`, on a model of two blocks that has learnt nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Call = Callable[..., Result]


def test_what_each_stage_is_worth(call: Call, site: Path, tmp_path: Path) -> None:
    whole = json.loads(call("evaluate", "--data", site, "--json").output)["loss"]
    done = call("evaluate", "--data", site, "--skip", "0.5", "--json", "--plot", tmp_path / "omission.png")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert [it["stages"] for it in found["any"]] == [[1]]
    assert [it["stages"] for it in found["the last"]] == [[1]]
    assert found["nothing"][0]["loss"] == pytest.approx(whole)
    assert found["any"][0]["loss"] != pytest.approx(whole, abs=1e-7)
    assert (tmp_path / "omission.png").stat().st_size > 1000


def test_people_read_a_table(call: Call, site: Path) -> None:
    done = call("evaluate", "--data", site, "--skip", "0.5")
    assert done.output.startswith("Round 3 of run 'small', 2 stages; left out:\n")
    assert "1 of 2 left out, in the mean: perplexity" in done.output
