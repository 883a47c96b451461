"""A site's part in rounds comes back from its disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rounds.cases import CALM, config, outer_state
from simulation.cluster import TinyLayout
from simulation.network import Network
from simulation.statements import MemoryProofs, PlainStatements
from simulation.virtual_time import run

from pier_node.config.run import RunConfig
from pier_node.gossip.pair_commit import Doubt, Records
from pier_node.outer.state import OuterState
from pier_node.rounds.commitments import Commitments
from pier_node.rounds.progress import Progress
from pier_node.rounds.proofs import PROOFS_FILE, Proofs, alone
from pier_node.rounds.roster import Roster
from pier_node.site.journal import Journal, PairJournal
from pier_node.site.membership import Joined, pairs_of_two, rounds_of_all
from pier_node.site.report import Reporter
from pier_node.site.settings import Settings
from pier_proto.v1.peer_pb2 import Site

AT_REST = outer_state(["a", "b"], round=4)


def roster_of(carrier: Any) -> Roster:
    return Roster(carrier, lambda: None)  # type: ignore[arg-type, return-value]


def joined(run_config: RunConfig, carrier: Any, folder: Path) -> Joined:
    reporter = Reporter(run_config, Site(node="a"), carrier, Progress())
    shared = roster_of(carrier), PlainStatements("a"), MemoryProofs(), reporter
    return Joined(run_config, Settings(folder), carrier, *shared)


async def nowhere(state: OuterState) -> None:
    raise AssertionError("nothing is committed here")


@pytest.mark.parametrize("bound", [Commitments(4, frozenset("ab"), (2, "b")), Commitments(9, frozenset("a"))])
def test_rounds_of_all_remember_what_binds_them(tmp_path: Path, bound: Commitments) -> None:
    async def main() -> None:
        carrier, layout = Network(1, CALM).join("a"), TinyLayout()
        Journal(tmp_path / "journal.json").keep(bound)
        rounds = rounds_of_all(joined(config(), carrier, tmp_path), nowhere, layout.length, AT_REST)
        assert rounds.promises.now == bound
        assert rounds.state is AT_REST

    run(main())


@pytest.mark.parametrize("left", [0, 1, 20, 100, None])
def test_a_state_without_its_proof_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, left: int | None) -> None:
    """Whatever became of the file of proofs: it is empty, cut off or as it was (None)."""
    path, statements = tmp_path / PROOFS_FILE, PlainStatements("a")
    Proofs(path).add([alone(outer_state(["a"], round=4), b"base", statements)])
    path.write_bytes(path.read_bytes()[:left])

    async def main() -> None:
        site = joined(config(), Network(1, CALM).join("a"), tmp_path)
        rounds_of_all(replace(site, proofs=Proofs(path)), nowhere, TinyLayout().length, AT_REST)

    run(main())
    told = f"{path} is damaged, it does not reach round 4: this site cannot prove to newcomers"
    assert (told in caplog.text) == (left is not None)


def test_pairs_remember_their_doubts(tmp_path: Path) -> None:
    records = Records({4: "b"}).voted(Doubt(3, "b", b"m" * 32, b"d" * 32))
    PairJournal(tmp_path / "pairs.json").keep(records)

    async def main() -> None:
        carrier = Network(1, CALM).join("a")
        run_config = config(
            run={"seed": 7}, inner={"total_steps": 100}, algorithm="noloco", inner_steps=10, noloco={"gamma": 0.3}
        )
        pairs = pairs_of_two(joined(run_config, carrier, tmp_path), AT_REST)
        assert pairs._tools.records == records
        assert (pairs._rendezvous._seed, pairs._last, pairs._tools.rates.gamma) == (7, 10, 0.3)
        assert (pairs.state, pairs.saved) == (AT_REST, 4)

    run(main())
