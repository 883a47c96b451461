"""What came out of a demo, in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pier_node.demo.plan import synchronous_bytes
from pier_node.demo.record import Curve, Record, Track
from pier_node.model.evaluate import bits_per_byte


@dataclass(frozen=True)
class SiteResult:
    """One site's part.

    Attributes:
        utilisation: the part of its training time that it spent in inner steps rather than in rounds; None: unknown.
        loss: of its training, nats a byte, seen now and then.
    """

    name: str
    finished: bool
    exit_code: int | None
    round: int
    tokens: int
    bytes_sent: int
    utilisation: float | None
    digest: str
    loss: Curve


@dataclass(frozen=True)
class Result:
    """The whole demo. Losses are nats a byte.

    Attributes:
        synchronous_bytes: that a site would have sent for as many steps, had gradients been averaged at each.
        saving: how many times less a site sent, in the mean over sites; None: nothing was sent.
        seconds: from the start of the first site to the last round.
        rounds_compared: after which digests of several sites were compared; they were `digests_equal` or not.
        spread: between the sites' models, where each has its own (noloco); None: they share one.
    """

    algorithm: str
    parameters: int
    steps: int
    rounds: int
    inner_steps: int
    initial_loss: float
    final_loss: float
    initial_bits_per_byte: float
    final_bits_per_byte: float
    synchronous_bytes: float
    mean_bytes_sent: float
    saving: float | None
    utilisation: float | None
    seconds: float
    digests_equal: bool
    rounds_compared: int
    spread: float | None
    validation: Curve
    sites: list[SiteResult]

    def as_json(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return asdict(self)


def measured(record: Record, seconds: float) -> Result:
    """The numbers of a run that has finished."""
    config, curve = record.config, record.validation
    sites = [_site(track, record) for track in record.tracks.values()]
    gradients = synchronous_bytes(config, record.parameters)
    sent = sum(site.bytes_sent for site in sites) / len(sites)
    known = [site.utilisation for site in sites if site.utilisation is not None]
    return Result(
        algorithm=config.outer.algorithm,
        parameters=record.parameters,
        steps=config.inner.total_steps,
        rounds=record.rounds,
        inner_steps=1 if config.outer.algorithm == "sync" else config.outer.inner_steps,
        initial_loss=curve[0][1],
        final_loss=curve[-1][1],
        initial_bits_per_byte=bits_per_byte(curve[0][1]),
        final_bits_per_byte=bits_per_byte(curve[-1][1]),
        synchronous_bytes=gradients,
        mean_bytes_sent=sent,
        saving=gradients / sent if sent else None,
        utilisation=sum(known) / len(known) if known else None,
        seconds=seconds,
        digests_equal=not record.forks,
        rounds_compared=record.compared,
        spread=record.spread,
        validation=curve,
        sites=sites,
    )


def _site(track: Track, record: Record) -> SiteResult:
    return SiteResult(
        name=track.name,
        finished=track.round >= record.rounds,
        exit_code=track.code,
        round=track.round,
        tokens=track.event.get("tokens", 0),
        bytes_sent=track.bytes_sent,
        utilisation=track.event.get("utilisation"),
        digest=track.event.get("digest", ""),
        loss=track.loss,
    )
