from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bench.codecs import cli, measure, relative_error
from bench.codecs_peers import Peer, peers
from pier_node.base.shared import Vector

VECTORS = {"ramp": np.arange(1, 1001, dtype=np.float32)}


def peer(name: str) -> Peer:
    return next(each for each in peers() if each.name == name)


def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "codecs.json"
    run = CliRunner().invoke(cli, ["--quick", "--json", str(file)], catch_exceptions=False)
    assert run.exit_code == 0
    figures = {each["system"]: each for each in json.loads(file.read_text())["results"]}
    assert list(figures) == [each.name for each in peers()]
    for name in ("bf16", "int8", "int4", "topk", "topk2", "hivemind Float16"):
        found = figures[name]
        assert name in run.output
        assert min(found["encode"], found["decode"]) > 0
        assert all(0 < error < 1 for error in found["errors"].values())
        assert len(found["errors"]) == 3
    assert figures["none"]["errors"] == dict.fromkeys(figures["none"]["errors"], 0.0)
    assert figures["topk"]["bits"] == 32 / 163.84


def test_figures_of_a_codec_that_is_known() -> None:
    halves = Peer("halves", lambda values: values / 2, lambda message: message, lambda message: 2 * len(message))
    found = measure(halves, VECTORS, reps=5)
    assert (found.system, found.bits, found.raises) == ("halves", 16, "")
    assert found.errors == {"ramp": pytest.approx(0.5)}
    assert found.encode > 0


def test_what_a_codec_raises_is_a_result() -> None:
    def refuse(values: Vector) -> Vector:
        raise OverflowError("too much\nof it")

    found = measure(Peer("refuses", refuse, refuse, len), VECTORS, reps=5)
    assert (found.raises, found.errors) == ("OverflowError: too much", {})


def test_reference_levels() -> None:
    values = np.repeat(np.linspace(-7, 7, 15, dtype=np.float32), 10)
    absmax, nf4 = peer("(4-bit absmax)"), peer("(NF4)")
    blocks = np.concatenate([np.full(1, 7, np.float32), values[:63], np.full(1, 7, np.float32), values[-30:]])
    np.testing.assert_allclose(absmax.decode(absmax.encode(blocks)), blocks, rtol=1e-6)
    assert absmax.size(absmax.encode(blocks)) == 47 + 4
    assert 0.01 < relative_error(blocks, nf4.decode(nf4.encode(blocks))) < 0.1
