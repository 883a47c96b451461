from __future__ import annotations

from typing import Any

import pytest

from pier_node.base.shared import Buffer, Vector
from pier_node.config.run import RunConfig
from pier_node.doctor import machine
from pier_node.doctor.finding import Finding
from pier_node.doctor.machine import boundary_finding
from pier_node.outer.codec.blockwise import Int4

PARAMETERS = 1_000_000


def _predicted(parameters: int, **outer: Any) -> list[Finding]:
    return boundary_finding(RunConfig.model_validate({"outer": outer}), parameters)


@pytest.mark.parametrize("algorithm", ["pier", "noloco"])
def test_it_grows_with_the_model(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([0.25, 0.25])
    monkeypatch.setattr(machine, "measured", lambda *_: next(took))
    small, large = (_predicted(size, algorithm=algorithm)[0] for size in (PARAMETERS, 4 * machine.SAMPLE))
    assert (small.values["daemon_seconds"], large.values["daemon_seconds"]) == (0.25, 1.0)
    assert "1 s of a round" in large.detail


@pytest.mark.parametrize("outer", [{}, {"codec": "int4", "overlap": True, "fragments": 5}, {"algorithm": "noloco"}])
def test_it_is_measured_with_all_that_a_round_takes(outer: dict[str, Any]) -> None:
    (finding,) = _predicted(PARAMETERS, **outer)
    assert 0.0 < finding.values["daemon_seconds"] < 60.0
    assert f"(codec {outer.get('codec', 'none')})" in finding.detail
    assert ("while workers wait" in finding.detail) is not ("overlap" in outer)


def test_every_value_is_encoded_once_and_decoded_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(Int4):
        encoded = decoded = 0

        def encode(self, values: Vector) -> bytes:
            self.encoded += len(values)
            return super().encode(values)

        def decode(self, data: Buffer, length: int) -> Vector:
            self.decoded += length
            return super().decode(data, length)

    counted = Counted()
    monkeypatch.setattr(machine, "codec", lambda *_: counted)
    machine.measured(RunConfig.model_validate({"outer": {"codec": "int4"}}), PARAMETERS)
    assert (counted.encoded, counted.decoded) == (2 * PARAMETERS, 6 * PARAMETERS)  # it is done twice


def test_synchronous_training_has_no_rounds() -> None:
    assert _predicted(PARAMETERS, algorithm="sync") == []
