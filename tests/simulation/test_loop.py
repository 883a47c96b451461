"""The event loop is nobody's for long: what is as long as the model is worked on in threads, or in pieces."""

from __future__ import annotations

from typing import Any

import pytest
from simulation.cluster import CHUNK, Cluster
from simulation.test_rounds import NAMES, config, whole_run
from simulation.virtual_time import elsewhere, run
from simulation.watched import watching

WAYS: list[dict[str, Any]] = [
    {},
    {"robust": "trimmed"},
    {"overlap": True},
    {"fragments": 2},
    {"overlap": True, "codec": "int8"},
    {"algorithm": "noloco", "final_merge": True},
    {"algorithm": "noloco", "overlap": True, "codec": "int8", "noloco": {"gamma": 0.3}},
]


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_nothing_as_long_as_the_model_is_worked_on_in_the_loop(
    ways: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through rounds, a crash, a restart from the disk and catching up."""

    async def main() -> None:
        with elsewhere():
            cluster = Cluster(config(3, **ways), NAMES[:3], seed=1, fail_at={("c3", 2, "exchanging"): "restart"})
        assert await whole_run(cluster, NAMES[:3])

    with watching(monkeypatch, piece=CHUNK) as noted:
        run(main())
    assert not noted, "\n".join(sorted(noted))
