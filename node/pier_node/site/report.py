"""What a site reports: the pulse for other sites, the status for people and programs, and which sites are missing.

The protocol identifies sites by node id, people by name: this module adds names to what people read. It also tells
people which sites must be started before this one can continue, since it cannot start them itself. StatusServer serves
the status on this machine, read-only: /healthz, /status (JSON), /metrics (Prometheus).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from pier_node.base.errors import PierError
from pier_node.base.http import make_runner, under_known_names
from pier_node.config.run import RunConfig
from pier_node.engine.program import RunView
from pier_node.gossip.pair_rounds import PairRounds
from pier_node.outer.schedule import round_plan, total_rounds
from pier_node.outer.state import OuterState
from pier_node.pipeline.vote_state import vote_state_of
from pier_node.rounds.folder import EARLIER_EVENTS_FILE, EVENTS_FILE
from pier_node.rounds.member import Rounds
from pier_node.rounds.progress import Progress
from pier_node.rounds.proofs import Trusted
from pier_node.rounds.quorum import has_quorum
from pier_node.rounds.roster import Roster
from pier_node.site.running import Status
from pier_node.wire.carrier import Carrier
from pier_proto.v1.coordinator_pb2 import Paths
from pier_proto.v1.peer_pb2 import Phase, Place, Pulse, Site

_NODE = re.compile(r"(?<![\w(])[0-9a-f]{16}(?!\w)")
"""A node id without a name next to it."""

Called = Callable[[str], str]
"""Node id -> "name (node id)", or the id alone when there is no name."""


def named(text: str, called: Called) -> str:
    """The text with names added to node ids."""
    return _NODE.sub(lambda found: called(found[0]), text)


def naming(called: Called) -> Callable[[logging.LogRecord], bool]:
    """A filter for log handlers that adds site names to every line; every line passes."""

    def name(record: logging.LogRecord) -> bool:
        record.msg, record.args = named(record.getMessage(), called), None
        return True

    return name


def name_in_logs(called: Called) -> None:
    """Add site names to everything that this process logs from now on."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(naming(called))


PATIENCE = 15.0
"""Seconds that sites must be silent before they are reported: a restart is not worth a message."""
LOOK = 1.0
MOST_OTHERS = 256
"""Most sites whose losses a program is told."""

log = logging.getLogger(__name__)


async def tell_of_missing(reporter: Reporter, roster: Roster) -> None:
    """Report missing sites, once per set of sites, in the log and in `reporter.missing`. Runs until cancelled."""
    now = asyncio.get_running_loop().time
    found, since = (frozenset[str](), False), now()
    while True:
        seen = _missing(reporter, roster), _lacks_new_ones(reporter, roster)
        if seen != found:
            found, since, reporter.missing = seen, now(), ""
        silent, new = found
        if (silent or new) and not reporter.missing and now() - since >= PATIENCE:
            reporter.missing = _said(sorted(map(roster.called, silent))) if silent else reporter.invitation
            log.log(logging.WARNING if silent else logging.INFO, "%s", reporter.missing)
        await asyncio.sleep(LOOK)


def _missing(reporter: Reporter, roster: Roster) -> frozenset[str]:
    """The silent sites without which this one waits forever."""
    waits = reporter.progress.phase in (Phase.PHASE_WAITING, Phase.PHASE_CATCHING_UP)
    if not waits:
        return frozenset()
    if reporter.rounds is None:  # no state yet: any site could provide it
        anybody = any(map(roster.alive, roster.contacts))
        return frozenset() if anybody else frozenset(site.node for site in roster.known())
    if not isinstance(reporter.rounds, Rounds):  # pairs: a site without a partner continues alone
        return frozenset()
    base = reporter.rounds.statements.base(reporter.rounds.state.members)
    here = {node for node in base.members if roster.alive(node)}
    return frozenset() if has_quorum(here, base) else frozenset(base.members) - here - {*base.convicted}


def _lacks_new_ones(reporter: Reporter, roster: Roster) -> bool:
    """Whether the first round of all sites cannot begin because too few have joined."""
    rounds, waits = reporter.rounds, reporter.progress.phase == Phase.PHASE_WAITING
    return isinstance(rounds, Rounds) and waits and len(roster.participants()) < rounds.sites


def _said(names: list[str]) -> str:
    alone = len(names) == 1
    who = "It" if alone else "They"
    return (
        f"{', '.join(names)} {'does' if alone else 'do'} not answer, and this site cannot continue without "
        f"{'it' if alone else 'them'}. {who} may have been stopped, or may have finished the run and ended: "
        "run `pier-node start --data FOLDER` there again. A site that has finished hands over its model."
    )


@dataclass
class Reporter:
    """Collects what this site reports.

    Attributes:
        rounds: None until this site has a state.
        place: returns its place in a pipeline; None: it has none.
        gives: whether it gives others what the stages of the pipeline begin with.
        paths: returns the paths that it planned for a pipeline; None: it planned none.
        wanted: returns the stage that the operator wants it to hold; None: any.
        missing: which sites must be started before this one can continue: see tell_of_missing.
        invitation: how another site joins the run, in words.
    """

    config: RunConfig
    site: Site
    carrier: Carrier
    progress: Progress
    rounds: Rounds | PairRounds | None = None
    place: Callable[[], Place | None] = lambda: None
    gives: bool = False
    paths: Callable[[], Paths | None] = lambda: None
    wanted: Callable[[], int | None] = lambda: None
    missing: str = ""
    invitation: str = ""

    def pulse(self) -> Pulse:
        """The pulse: what other sites may know without asking for more."""
        progress, rounds = self.progress, self.rounds
        return Pulse(
            site=self.site,
            phase=Phase.PHASE_EXCHANGING if rounds and rounds.exchanging else progress.phase,
            round=rounds.state.round if rounds else 0,
            digest=rounds.state.digest if rounds else b"",
            inner_step=progress.inner_step,
            tokens=progress.tokens,
            tokens_per_second=progress.tokens_per_second,
            loss=_finite(progress.loss),
            validation_loss=_finite(progress.validation_loss),
            bytes_sent=self.carrier.bytes_sent(),
            time=time.time(),
            training_for=progress.training_for,
            spread=_finite(progress.spread),
            place=self.place(),
            wanted_stage=self.wanted(),
            gives=self.gives,
            vouches=rounds.vouches if isinstance(rounds, PairRounds) else (),
        )

    def view(self, roster: Roster) -> RunView:
        """How the run stands, for a program of the site's owner."""
        others = {node: pulse for node, pulse in roster.participants().items() if node != self.carrier.node}
        known = [(node, pulse) for node, pulse in others.items() if math.isfinite(pulse.loss)][:MOST_OTHERS]
        names = Counter(pulse.site.name for _, pulse in known)
        losses = {
            pulse.site.name if pulse.site.name and names[pulse.site.name] == 1 else roster.called(node): pulse.loss
            for node, pulse in known
        }
        return RunView(self.rounds.decided.round if self.rounds else 0, len(others) + 1, losses)

    def status(self, roster: Roster) -> Status:
        """Everything that `pier-node status` shows. Numbers that are not known yet are NaN."""
        peers = [_peer(roster, node) for node in sorted(roster.contacts)]
        waits = named(self.rounds.last_error if self.rounds else "", roster.called)
        message = ". ".join(filter(None, [waits, self.missing]))
        told = {"message": message, "mean_spread": self._mean_spread(roster)}
        return {**self._run(), **self._site(), **told, "peers": peers}

    def event(self, state: OuterState, roster: Roster) -> Status:
        """The status after a committed round, for `note`. The site itself may be at another state."""
        told = {
            "round": state.round,
            "digest": state.digest.hex(),
            "members": list(state.members),
            "tokens_in_anchor": self._tokens_in(state),
        }
        event = {"time": time.time(), "pid": os.getpid(), **self.status(roster), **told}
        if (proven := self._proven()) and proven.round != state.round:
            event["fingerprint"] = Trusted(state.round, state.digest, state.members).fingerprint
        event.pop("peers")
        return event

    def _mean_spread(self, roster: Roster) -> float:
        """Mean over the last reports of live sites: each one sees one partner per round, together they see the run."""
        known = [pulse.spread for pulse in roster.participants().values() if math.isfinite(pulse.spread)]
        return sum(known) / len(known) if known else math.nan

    def _run(self) -> Status:
        state = self.rounds.state if self.rounds else None
        return {
            "run": self.config.run.name,
            "run_hash": self.config.hash().hex(),
            "algorithm": self.config.outer.algorithm,
            "rounds": total_rounds(self.config),
            "total_steps": self.config.inner.total_steps,
            "members": list(state.members) if state else [],
            "fingerprint": trusted.fingerprint if (trusted := self._proven()) else "",
            "tokens_in_anchor": self._tokens_in(state) if state else 0,
        }

    def _tokens_in(self, state: OuterState) -> int:
        """Tokens that a state was trained with; each of its fragments has been trained with about as many.

        In a pipeline, the ledger holds something else.
        """
        if self.config.pipeline.stages == 1:
            return sum(count for key, count in state.ledger.items() if "/" not in key)
        return vote_state_of(state).steps * self.config.pipeline.microbatches * self.config.step_tokens

    def _proven(self) -> Trusted | None:
        """What a newcomer may be told to trust; None: there is no state yet, or states are not voted on."""
        return self.rounds.trust().state if isinstance(self.rounds, Rounds) else None

    def _steps_done(self) -> int:
        """Inner steps of the round under way that are done here."""
        progress = self.progress
        if not progress.training_for:
            return 0
        plan = round_plan(self.config, progress.training_for)
        return max(0, min(progress.steps, progress.inner_step - (plan.first_step + plan.steps - progress.steps)))

    def _site(self) -> Status:
        progress, pulse = self.progress, self.pulse()
        busy = progress.compute + progress.waited
        return {
            "node": self.carrier.node,
            "name": self.site.name,
            "address": self.site.address,
            "phase": phase_name(pulse.phase),
            "round": pulse.round,
            "digest": pulse.digest.hex(),
            "inner_step": progress.inner_step,
            "tokens": progress.tokens,
            "tokens_per_second": progress.tokens_per_second,
            "loss": progress.loss,
            "gradient_norm": progress.gradient_norm,
            "validation_loss": progress.validation_loss,
            "members_loss": progress.members_loss,
            "spread": progress.spread,
            "expert": progress.expert,
            "metrics": dict(progress.metrics),
            "bytes_sent": pulse.bytes_sent,
            "round_seconds": progress.round_time,
            "round_steps": progress.steps,
            "round_steps_done": self._steps_done(),
            "iteration": asdict(progress.spans) if progress.spans else {},
            "utilisation": progress.compute / busy if busy else math.nan,
            "device": progress.device.words,
            "device_bytes": progress.device.peak_bytes,
            "mfu": progress.device.mfu(progress.tokens_per_second),
            "clipped": dict(self.rounds.clipped) if isinstance(self.rounds, Rounds) else {},
        }


def _peer(roster: Roster, node: str) -> Status:
    contact = roster.contacts[node]
    pulse = contact.pulse or Pulse(loss=math.nan, spread=math.nan)
    return {
        "node": node,
        "name": contact.site.name,
        "address": contact.site.address,
        "alive": roster.alive(node),
        "phase": phase_name(pulse.phase) if contact.pulse else "not known",
        "round": pulse.round,
        "digest": pulse.digest.hex(),
        "inner_step": pulse.inner_step,
        "tokens_per_second": pulse.tokens_per_second,
        "loss": pulse.loss,
        "spread": pulse.spread,
        "bytes_sent": pulse.bytes_sent,
        "round_trip": contact.round_trip,
        "last_error": contact.last_error,
    }


def _finite(loss: float) -> float:
    """A diverged loss is reported as NaN: peers reject infinite numbers."""
    return loss if math.isfinite(loss) else math.nan


MOST_EVENTS = 1 << 28
"""Bytes of a file of events: a hundred thousand rounds and more. It then takes the place of the one before it."""


def note(folder: Path, event: Status) -> None:
    """Append the status after a committed round to the folder's events.jsonl."""
    path = folder / EVENTS_FILE
    if path.exists() and path.stat().st_size >= MOST_EVENTS:
        path.replace(folder / EARLIER_EVENTS_FILE)
    with path.open("ab+") as file:
        file.seek(max(0, file.tell() - 1))
        begin = "" if file.read() in (b"", b"\n") else "\n"  # the machine failed in the middle of a line
        file.write(f"{begin}{json.dumps(finite(event))}\n".encode())


def finite(value: Any) -> Any:
    """The value with each non-finite number replaced by None, because JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value


def phase_name(phase: Phase.ValueType) -> str:
    """PHASE_CATCHING_UP -> "catching up"."""
    return Phase.Name(phase).removeprefix("PHASE_").replace("_", " ").lower()


METRICS = {
    "round": "last committed outer round",
    "inner_step": "inner steps done",
    "tokens": "tokens trained on by this site",
    "tokens_per_second": "speed of the inner training",
    "loss": "last training loss, nats a token",
    "gradient_norm": "norm of the last gradient, before clipping",
    "validation_loss": "last validation loss, nats a token",
    "spread": "standard deviation between replicas, as the last pair saw it (noloco)",
    "bytes_sent": "payload bytes sent to other sites",
    "round_seconds": "duration of the last outer round",
    "utilisation": "fraction of the time spent in inner steps",
    "device_bytes": "peak memory of one GPU, bytes",
    "mfu": "fraction of the GPUs' peak FLOPs that the model takes",
}


class StatusServer:
    """Serves a status on 127.0.0.1.

    Args:
        status: returns the current status; see report.py.
    """

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status
        self._runner: web.AppRunner | None = None
        self._registry = CollectorRegistry()
        self._gauges = {
            name: Gauge(f"pier_{name}", text, ["run", "site"], registry=self._registry)
            for name, text in METRICS.items()
        }

    async def start(self, port: int) -> int:
        """Start listening. Returns the port. Raises PierError."""
        app = web.Application(middlewares=[under_known_names()])
        app.add_routes(
            [web.get("/healthz", self._healthz), web.get("/status", self._json), web.get("/metrics", self._metrics)]
        )
        self._runner = make_runner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        try:
            await site.start()
        except OSError as error:
            problem = f"the status page cannot listen on 127.0.0.1:{port}: {os.strerror(error.errno or 0)}"
            raise PierError(problem, "Choose another port with --http PORT, or leave it out.") from error
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner:
            await self._runner.cleanup()

    async def _healthz(self, _request: web.Request) -> web.Response:
        """Healthy as long as the daemon answers; `phase` says what it is doing."""
        return web.json_response({"ok": True, "phase": self._status()["phase"]})

    async def _json(self, _request: web.Request) -> web.Response:
        """What `pier-node status --json` prints."""
        return web.json_response(finite(self._status()))

    async def _metrics(self, _request: web.Request) -> web.Response:
        """The metrics below, for Prometheus."""
        status = self._status()
        for name, gauge in self._gauges.items():
            value = status.get(name)
            gauge.labels(status["run"], status["name"]).set(math.nan if value is None else value)
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
