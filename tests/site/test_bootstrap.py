"""A site's first state: the run's seed at its founder, the peers' newest state elsewhere, once there is one."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from simulation.cluster import LENGTH
from simulation.network import Network, Weather
from simulation.virtual_time import run

from pier_node.base.shared import SharedVector
from pier_node.config.run import RunConfig
from pier_node.outer.layout import Layout
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.rounds.roster import Roster
from pier_node.site.resume import beginning, from_peers
from pier_node.wire.states import StateServer
from pier_proto.v1.peer_pb2 import Phase, Pulse, Site

TINY: dict[str, Any] = {"model": {"preset": "llama-tiny"}, "inner": {"total_steps": 100}}
CONFIG = RunConfig.model_validate({**TINY, "outer": {"inner_steps": 10, "start": "solo", "start_fraction": 0.2}})


def test_the_founder_begins_from_the_seed() -> None:
    layout = Layout.of(CONFIG.model)
    first, again = (beginning(CONFIG, layout, "a").state for _ in range(2))
    assert (first.round, first.members, dict(first.ledger)) == (0, ("a",), {})
    assert first.digest == again.digest
    assert first.anchor.std() > 0
    assert not first.momentum.any()


class Founder:
    """Serves whatever state it is at."""

    def __init__(self, network: Network) -> None:
        self.carrier = network.join("a")
        self.state = self._at(0)
        self.roster = Roster(self.carrier, self.pulse)
        StateServer(self.carrier, lambda number, _: self.state if number in (0, self.state.round) else None)

    def pulse(self) -> Pulse:
        site = Site(node="a", address="sim")
        return Pulse(site=site, phase=Phase.PHASE_TRAINING, round=self.state.round, digest=self.state.digest)

    def commit(self) -> None:
        self.state = self._at(self.state.round + 1)

    def _at(self, number: int) -> OuterState:
        tensors = {name: SharedVector(LENGTH) for name in (ANCHOR, MOMENTUM)}
        tensors[ANCHOR].array[:] = np.arange(LENGTH) + number
        return OuterState(number, ("a",), tensors, {"a": 100 * number})


def test_a_newcomer_waits_for_the_end_of_a_solo_start() -> None:
    async def main() -> None:
        network = Network(1, Weather())
        founder = Founder(network)
        carrier = network.join("b")
        roster = Roster(carrier, lambda: Pulse(site=Site(node="b", address="sim")))
        roster.add(Site(node="a", address="sim"))
        joining = asyncio.create_task(from_peers(CONFIG, LENGTH, carrier, roster, lambda: None))
        await asyncio.sleep(60)
        founder.commit()
        await asyncio.sleep(60)
        assert not joining.done(), "one of two rounds of the start is done"
        founder.commit()
        checkpoint, _ = await asyncio.wait_for(joining, 60)
        assert checkpoint.state.digest == founder.state.digest
        assert checkpoint.adam_m is None, "each site's optimizer is its own"
        await roster.stop()

    run(main())


def test_another_newcomer_has_nothing_to_give() -> None:
    async def main() -> None:
        network = Network(1, Weather())
        carriers = [network.join(name) for name in ("b", "c")]
        pulses = [Pulse(site=Site(node=carrier.node, address="sim")) for carrier in carriers]
        rosters = [Roster(carriers[0], lambda: pulses[0]), Roster(carriers[1], lambda: pulses[1])]
        rosters[0].add(Site(node="c", address="sim"))
        joining = asyncio.create_task(from_peers(CONFIG, LENGTH, carriers[0], rosters[0], lambda: None))
        await asyncio.sleep(120)
        assert not joining.done()
        joining.cancel()
        for roster in rosters:
            await roster.stop()

    run(main())
