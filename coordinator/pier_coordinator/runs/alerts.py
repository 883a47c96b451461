"""Alerts: what is wrong with a run, in words, and what to do about it.

Each rule looks at the board and yields alerts. To keep alerts from flickering, a Watch remembers which are up, and a
rule may use a lower threshold for those; apart from that the module is pure. Where the exchange takes too long, the
remedy is computed from the run's figures: another codec, or more inner steps between rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import mean, median
from typing import Any, Literal

from pier_coordinator.runs.read_model import FEW_SITES, ReadModel
from pier_coordinator.runs.sites import Site
from pier_coordinator.runs.timings import Segment, Slow, shares, slowest
from pier_node.base.units import age, amount, rate

BYTES = {"none": 4.0, "bf16": 2.0, "int8": 1.01, "int4": 0.52}
"""Bytes per value on the wire, by codec (docs/results.md, codecs)."""

GOAL = 0.25
"""An exchange that takes at most this fraction of the inner steps' time is short enough."""

PASSES = 2
"""A member sends its update once in the reduce-scatter, and its shard once to all members in the all-gather."""


def in_stages(run: Mapping[str, Any]) -> bool:
    """Whether the run is a pipeline: its sites exchange what an iteration's paths require, without a codec."""
    return (run.get("stages") or 1) > 1


def payload(run: Mapping[str, Any], segments: Sequence[Segment]) -> float | None:
    """Bytes that a site sends per round: as measured, else from the model's size; None if neither is known."""
    sent = [later.bytes_sent - earlier.bytes_sent for earlier, later in pairwise(segments)]
    measured = [amount for amount in sent if amount > 0]
    if measured:
        return mean(measured)
    width = BYTES.get(run.get("codec") or "none")
    return PASSES * run["parameters"] * width if run.get("parameters") and width else None


def shorter_exchange(run: Mapping[str, Any], segments: Sequence[Segment], uplink: float | None) -> str:
    """A remedy for a site that is late or whose exchange takes too long; `uplink` in bytes per second."""
    if in_stages(run):
        return "its log says what it fetches, and from whom (pier-coordinator logs)"
    size, compute = payload(run, segments), mean(row.compute for row in segments) if segments else 0.0
    if not size or not uplink or not compute:
        return "measure its link with pier-node doctor; a narrower codec or a larger H (outer.inner_steps) needs less"
    factor = size / uplink / (GOAL * compute)
    if factor <= 1:
        return "its link is fast enough for this run: see what else uses the link, and its log (pier-coordinator logs)"
    gain = BYTES.get(run.get("codec") or "none", 0.0) / BYTES["int4"]
    codec = "" if gain <= 1 else "codec int4 or " if gain >= factor else "codec int4 and "
    if not (steps := run.get("inner_steps")):
        return f"try {codec}{factor:.2g} times as many inner steps between rounds"
    return f"try {codec}H = {_round_up(steps * (factor / gain if 1 < gain < factor else factor))}"


def _round_up(steps: float) -> int:
    """Round up to a multiple of 5 in the second digit: 187 -> 200."""
    unit = 10 ** max(0, math.floor(math.log10(steps)) - 1)
    return int(math.ceil(steps / (5 * unit)) * 5 * unit)


Severity = Literal["error", "warning"]

RECENT = 20
"""Number of a site's latest rounds from which shares of time are computed."""

LATE = (3, 2)
SHARE = (0.5, 0.4)
RETRIED = (0.3, 0.2)
CLOCK = (5.0, 4.0)
RISE = (0.3, 0.15)
"""Thresholds: the first raises an alert, the second keeps it up. Units, in order: rounds, fraction of the time,
fraction of the rounds, seconds, nats per token."""

CONFIRMED = 2
"""Number of consecutive validations that must be worse than the best one before them."""

STALLED = 60.0
"""A run is stalled after this many seconds, and ten times a round's duration, without a commit while sites wait."""

ERROR_SHOWN = 600.0
"""Seconds for which an error in a site's log is shown."""

STAYS = 5.0
"""Seconds for which an alert stays up after its cause was last seen."""

MOST = 20
"""Maximum number of alerts shown: more than that have one common cause."""

ERROR = 40


@dataclass(frozen=True)
class Alert:
    """A problem.

    Attributes:
        node: node id of the site; "" if it concerns no single site.
        text: what is wrong.
        remedy: what to do about it.
        since: seconds since the epoch; when the alert was raised.
    """

    kind: str
    severity: Severity
    node: str
    text: str
    remedy: str
    since: float = 0.0


Rule = Callable[[ReadModel, Callable[[str, str], bool]], Iterator[Alert]]
"""Called with the board and with a function that says whether an alert (kind, node) is up already."""


class Watch:
    """Looks at a board now and then, and remembers which alerts are up."""

    def __init__(self) -> None:
        self._up: dict[tuple[str, str], Alert] = {}
        self._seen: dict[tuple[str, str], float] = {}

    def look(self, board: ReadModel) -> list[Alert]:
        """The alerts that are up now: errors first, then by age, the oldest first."""
        now = board.now()
        board.refresh()
        for rule in RULES:
            for alert in rule(board, lambda kind, node: (kind, node) in self._up):
                key = (alert.kind, alert.node)
                self._up[key] = replace(alert, since=self._up[key].since if key in self._up else now)
                self._seen[key] = now
        for key in [key for key, seen in self._seen.items() if now - seen > STAYS]:
            del self._seen[key], self._up[key]
        return sorted(self._up.values(), key=lambda alert: (alert.severity != "error", alert.since))[:MOST]

    def told(self, board: ReadModel) -> list[dict[str, Any]]:
        """The alerts that are up now, for JSON."""
        return [{**asdict(alert), "name": board.name(alert.node)} for alert in self.look(board)]


def _silent(board: ReadModel, _up: Callable[[str, str], bool]) -> Iterator[Alert]:
    others = "; the others train on" if any(site.shown == "training" for site in board.live()) else ""
    for site in board.sites.values():
        if site.shown == "silent":
            text = f"{site.name}: silent for {_while(board.now() - site.heard)}"
            remedy = f"see there whether its machine is up and pier-node runs (pier-node status){others}"
            yield Alert("silent", "error", site.node, text, remedy)


def _disk(board: ReadModel, _up: Callable[[str, str], bool]) -> Iterator[Alert]:
    if board.problem:
        remedy = (
            "free space on the disk of its folder, or restore its database from a backup if that is damaged; sites "
            "train on, and keep their reports until then"
        )
        yield Alert("disk", "error", "", f"the coordinator cannot store anything: {board.problem}", remedy)


def _while(seconds: float) -> str:
    """A duration in words. It is coarse, because a screen reader repeats an alert whenever its text changes."""
    return age(seconds) if seconds >= 120 else "a minute" if seconds >= 60 else "less than a minute"


def _stalled(board: ReadModel, _up: Callable[[str, str], bool]) -> Iterator[Alert]:
    live, still = board.live(), board.now() - board.moved
    waiting = [site for site in live if site.shown in ("waiting", "exchanging")]
    beginning = len(board.sites) < (board.run.get("sites") or 0)  # the first exchange needs all sites
    if not waiting or len(waiting) < len(live) or not board.round or beginning:
        return
    if still > max(STALLED, 10 * (board.round_seconds() or 0.0)):
        gone = ", ".join(site.name for site in board.sites.values() if site.shown in ("silent", "left"))
        remedy = "bring back enough of the last round's members for a majority" + (f": {gone}" if gone else "")
        text = f"no round for {_while(still)}: all that are here wait, {len(live)} of {len(board.known())} sites"
        yield Alert("stalled", "error", "", text, f"{remedy}; their logs say for whom (pier-coordinator logs)")


def _late(board: ReadModel, up: Callable[[str, str], bool]) -> Iterator[Alert]:
    for site in board.live():
        if site.shown in ("paused", "leaving"):
            continue
        lag = board.round - site.round
        if lag >= LATE[up("late", site.node)] and site.round:
            uplink = board.links.uplink(site.node)
            line = f", uplink {rate(uplink)}" if uplink else ""
            text = f"{site.name}: {lag} rounds late{line}"
            yield Alert("late", "warning", site.node, text, _shorter(board, site))


def _shorter(board: ReadModel, site: Site) -> str:
    return shorter_exchange(board.run, site.segments.last(RECENT), board.links.uplink(site.node))


def _time(board: ReadModel, up: Callable[[str, str], bool]) -> Iterator[Alert]:
    """Waiting or the exchange takes most of the time. A pipeline is exempt: it waits for microbatches by plan."""
    if in_stages(board.run):
        return
    by_node = {site.node: site.segments.last(RECENT) for site in board.live()[: 4 * FEW_SITES]}
    spent = shares([row for rows in by_node.values() for row in rows])
    if sum(map(len, by_node.values())) < RECENT:
        return
    if spent.get("waiting", 0.0) > SHARE[up("waiting", "")]:
        yield _waiting(board, slowest(by_node), spent["waiting"])
    if spent.get("exchange", 0.0) > SHARE[up("exchange", "")]:
        yield _exchange(board, spent["exchange"])


def _waiting(board: ReadModel, slow: Slow | None, share: float) -> Alert:
    text = f"sites wait for each other {100 * share:.0f} % of the time"
    if slow is None:
        remedy = "none is the slowest throughout: the rounds show who came late, and when"
        return Alert("waiting", "warning", "", text, remedy)
    site = board.sites[slow.node]
    text += f": {site.name} takes {slow.busy:.3g} s a round, the others {slow.others:.3g} s, mostly {slow.cause}"
    if slow.cause == "exchange":
        return Alert("waiting", "warning", "", text, _shorter(board, site))
    remedy = f"see what slows {site.name} down; outer.adaptive_steps = true, the default, has it do fewer steps"
    return Alert("waiting", "warning", "", text, remedy)


def _exchange(board: ReadModel, share: float) -> Alert:
    text = f"the exchange takes {100 * share:.0f} % of the time"
    measured = [(uplink, site) for site in board.live() if (uplink := board.links.uplink(site.node))]
    if not measured:
        return Alert(
            "exchange", "warning", "", text, "overlap = true hides it; a narrower codec or a larger H shortens it"
        )
    uplink, site = min(measured, key=lambda it: it[0])
    text += f"; the thinnest uplink is that of {site.name}, {rate(uplink)}"
    return Alert("exchange", "warning", "", text, f"{_shorter(board, site)}; overlap = true hides it")


def _retries(board: ReadModel, up: Callable[[str, str], bool]) -> Iterator[Alert]:
    retried: dict[float, bool] = {}
    for site in board.live()[: 4 * FEW_SITES]:
        for row in site.segments.last(RECENT):
            retried[row.round] = retried.get(row.round, False) or row.retry > 0
    last = [retried[round] for round in sorted(retried)[-RECENT:]]
    if len(last) >= RECENT / 2 and sum(last) / len(last) >= RETRIED[up("retries", "")]:
        text = f"{sum(last)} of the last {len(last)} rounds needed another attempt"
        remedy = "see in the events which site drops out, and its link: pier-node doctor --peers HOST:PORT"
        yield Alert("retries", "warning", "", text, remedy)


def _loss(board: ReadModel, up: Callable[[str, str], bool]) -> Iterator[Alert]:
    remedy = "stop the run, and resume it from a checkpoint with a lower inner.lr"
    for site in board.live():
        if site.loss is None and (site.inner_step or 0) > 0 and site.tokens_per_second:
            yield Alert("not finite", "error", site.node, f"{site.name}: its loss is not a number any more", remedy)
    measured = board.curves["validation_loss"].means()  # the training loss of single batches is too noisy
    if len(measured) < 2 * CONFIRMED:
        return
    now, best = min(measured[-CONFIRMED:]), min(measured[:-CONFIRMED])
    if now > best + RISE[up("rising", "")] and now > 1.05 * best:
        text = f"the validation loss rises: {now:.3g} now, {best:.3g} at its best"
        yield Alert("rising", "error", "", text, "lower inner.lr or outer.lr; see whether a site trains on broken data")


def _clocks(board: ReadModel, up: Callable[[str, str], bool]) -> Iterator[Alert]:
    offsets = {site.node: site.offset for site in board.live() if site.offset is not None}
    usual = median(offsets.values()) if len(offsets) > 2 else 0.0
    for node, offset in offsets.items():
        ahead = offset - usual
        if abs(ahead) > CLOCK[up("clock", node)]:
            way = "ahead" if ahead > 0 else "behind"
            text = f"{board.name(node)}: its clock is {age(abs(ahead))} {way}"
            yield Alert("clock", "warning", node, text, "set it by NTP (timedatectl set-ntp true)")


def _dropped(board: ReadModel, _up: Callable[[str, str], bool]) -> Iterator[Alert]:
    for site in board.known():
        if site.dropped:
            text = f"{site.name}: {site.dropped:,} of its reports were lost while it could not reach the coordinator"
            yield Alert(
                "dropped", "warning", site.node, text, "curves have gaps there; the training itself lost nothing"
            )


def _memory(board: ReadModel, up: Callable[[str, str], bool]) -> Iterator[Alert]:
    for site in board.live():
        first, now = site.first_memory or 0.0, site.memory or 0.0
        if now - first > 1e9 and now > (1.5 if up("memory", site.node) else 2.0) * first > 0:
            text = f"{site.name}: its memory has grown from {amount(first)} to {amount(now)}"
            yield Alert(
                "memory", "warning", site.node, text, "restart pier-node there before the machine runs out of it"
            )


def _errors(board: ReadModel, _up: Callable[[str, str], bool]) -> Iterator[Alert]:
    newest: dict[str, str] = {}
    for event in board.events():
        if event["kind"] == "note" and event["level"] >= ERROR and board.now() - event["time"] < ERROR_SHOWN:
            newest[event["node"]] = event["text"]
    for node, text in newest.items():
        yield Alert("error", "error", node, f"{board.name(node)}: {text}", "see its log: pier-coordinator logs")


RULES: tuple[Rule, ...] = (_disk, _silent, _stalled, _late, _time, _retries, _loss, _clocks, _dropped, _memory, _errors)
