"""Facts that a run could have left: three sites, one of them slow on a thin line, retries, one that falls silent."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.store.facts import Fact

START = 1_760_000_000.0
PAYLOAD = 10_600_000
WRITTEN = (
    "e th oa nrtte i sh, anoe tthr wes ila",
    "The the of and thesr wa s in tha bore and the the",
    "The sea was and the men of the had to the water in",
    "In the sea was the ship of the man that had the water, and the men were on the",
    "The ship was in the harbour before the tide, and the men that had come to it were",
    "The harbour was built in the year of the storm, and the ships that came to it were few.",
)


def node(name: str) -> str:
    """Its node id."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


class Replayed(ReadModel):
    """A board whose time is that of its newest fact."""

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self.newest = 0.0
        super().__init__(lambda: self.newest)
        for fact in facts:
            self.apply(fact)

    def apply(self, fact: Fact) -> None:
        self.newest = max(self.newest, fact.time)
        super().apply(fact)


@dataclass(frozen=True)
class Lab:
    """A site: seconds of compute a round, bytes per second of its uplink, seconds of a round trip to it."""

    name: str
    compute: float
    uplink: float
    trip: float
    speed: float


LABS = (
    Lab("lab-a", 21.0, 41e6, 0.012, 9_800.0),
    Lab("lab-b", 24.0, 0.5e6, 0.110, 5_200.0),
    Lab("lab-c", 20.0, 23e6, 0.031, 10_400.0),
)


@dataclass
class Played:
    """A run that is made up.

    Args:
        rounds: of which the facts tell; the run has `planned`.
        late: rounds at the end that lab-b has not committed.
        silent: rounds at the end in which lab-c said nothing.
        seed: of what is random in it.
    """

    rounds: int = 60
    planned: int = 100
    late: int = 0
    silent: int = 0
    labs: tuple[Lab, ...] = LABS
    retried: tuple[int, ...] = (17, 18, 41)
    start: float = START
    seed: int = 1
    run: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> list[Fact]:
        """In the order in which they came, with their numbers."""
        return [
            Fact(fact.time, fact.kind, fact.node, fact.body, number)
            for number, fact in enumerate(sorted(self._all(), key=lambda fact: fact.time), start=1)
        ]

    @property
    def end(self) -> float:
        """When the last fact came."""
        return max(fact.time for fact in self._all())

    def _all(self) -> Iterator[Fact]:
        dice = random.Random(self.seed)
        yield Fact(self.start, "run", "", self._run())
        for at, lab in enumerate(self.labs):
            yield self._site(self.start + 0.2 + 0.01 * at, lab)
        clock = self.start + 4.0
        for number in range(1, self.rounds + 1):
            retry = 6.4 if number in self.retried else 0.0
            computes = {lab.name: lab.compute * dice.uniform(0.95, 1.06) for lab in self.labs}
            together = max(computes.values())
            exchange = 2 * PAYLOAD / 2 / min(lab.uplink for lab in self.labs) * 0.45 * dice.uniform(0.9, 1.2)
            for lab in self.labs:
                if self._there(lab, number):
                    yield from self._round(lab, number, clock, computes[lab.name], together, exchange, retry, dice)
            if retry and len(self.labs) > 1:
                text = f"round {number}: lab-b sent nothing for 6.4 s; next attempt without it"
                yield Fact(clock + together + retry, "note", node(self.labs[0].name), {"level": 30, "text": text})
            clock += together + exchange + retry

    def _there(self, lab: Lab, number: int) -> bool:
        gone = {"lab-b": self.late, "lab-c": self.silent}.get(lab.name, 0)
        return number <= self.rounds - gone

    def _run(self) -> dict[str, Any]:
        body = {"name": "atlantic", "run_hash": "ab" * 32, "algorithm": "pier", "rounds": self.planned}
        more = {"total_steps": 50 * self.planned, "sites": len(self.labs), "inner_steps": 50, "codec": "bf16"}
        return {**body, **more, "parameters": 5_300_000, **self.run}

    def _site(self, time: float, lab: Lab) -> Fact:
        address = f"{lab.name}.example.org:7700"
        body = {"name": lab.name, "address": address, "transport": "grpc", "version": "0.1.0", "workers": 2}
        return Fact(time, "site", node(lab.name), body)

    def _round(
        self,
        lab: Lab,
        number: int,
        clock: float,
        compute: float,
        together: float,
        exchange: float,
        retry: float,
        dice: random.Random,
    ) -> Iterator[Fact]:
        end, name = clock + together + exchange + retry, node(lab.name)
        for at in range(3):
            yield Fact(clock + together * (at + 0.5) / 3, "sample", name, self._sample(lab, number - 1 + at / 3, dice))
        body = {"round": number, "digest": "cd" * 32, "members": [node(it.name) for it in self.labs], "steps": 50}
        parts = {"compute": compute, "waiting": together - compute, "exchange": exchange, "retry": retry}
        tokens = {"tokens": int(number * lab.speed * 25), "bytes_sent": number * PAYLOAD}
        measured = _loss(number) + 0.06 if number % 5 == 0 else None
        losses = {"loss": _loss(number) + dice.uniform(-0.02, 0.02), "validation_loss": measured}
        sample = {"sample": WRITTEN[min(number // 10, len(WRITTEN) - 1)]} if number % 5 == 0 else {}
        yield Fact(end, "round", name, {**body, **parts, **tokens, **losses, **sample})
        for peer in self.labs:
            if peer is not lab:
                yield Fact(end + 0.01, "link", name, _link(lab, peer, number, dice))

    def _sample(self, lab: Lab, round: float, dice: random.Random) -> dict[str, Any]:
        return {
            "inner_step": int(50 * round) + 17,
            "tokens": int((round + 0.3) * lab.speed * 25),
            "tokens_per_second": lab.speed * dice.uniform(0.97, 1.03),
            "loss": _loss(round + 0.5) + dice.uniform(-0.06, 0.06),
            "utilisation": dice.uniform(0.6, 0.72),
            "bytes_sent": int(round * PAYLOAD),
            "memory": 2_100_000_000,
            "device": "2 x NVIDIA H100 80GB HBM3 (79 GiB each), bf16",
            "device_memory": 41_000_000_000,
            "mfu": dice.uniform(0.36, 0.41),
            "cpu": dice.uniform(0.1, 0.3),
            "gradient_norm": 0.4 + 1.6 * math.exp(-round / 8) * lab.speed / (lab.speed + 1000),
        }


def _loss(round: float) -> float:
    return 2.05 + 3.4 * math.exp(-round / 14) + 0.35 * math.exp(-round / 60)


def _link(lab: Lab, peer: Lab, number: int, dice: random.Random) -> dict[str, Any]:
    bandwidth = min(lab.uplink, peer.uplink * 1.6) * dice.uniform(0.9, 1.05)
    trip = (lab.trip + peer.trip) / 2 * dice.uniform(0.95, 1.1)
    return {"peer": node(peer.name), "round_trip": trip, "bandwidth": bandwidth, "bytes_sent": number * PAYLOAD // 2}


def pulse(lab: Lab, round: int, offset: float = 0.0, phase: str = "PHASE_TRAINING") -> dict[str, Any]:
    """What a site says in a heartbeat."""
    numbers = {"inner_step": 50 * round, "tokens": int(round * lab.speed * 25), "tokens_per_second": lab.speed}
    return {
        "phase": phase,
        "round": round,
        "loss": _loss(round),
        "bytes_sent": round * PAYLOAD,
        "offset": offset,
        **numbers,
    }


def many(count: int) -> tuple[Lab, ...]:
    """So many sites, each a little different."""
    dice = random.Random(count)
    return tuple(
        Lab(f"site-{at:04}", dice.uniform(18, 24), dice.uniform(2e6, 60e6), dice.uniform(0.01, 0.2), 9_000.0)
        for at in range(1, count + 1)
    )
