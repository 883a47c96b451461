"""The board: everything that the page shows, built from facts and, while the run is live, from pulses.

The board is pure and bounded in memory. Every change gets a stamp, a number that only increases; a client that has seen
the board at a stamp asks for what has changed since. The board keeps the newest measurement of each link and turns
facts into words. Since samples arrive one by one, a value of the whole run is made of the latest value of each site,
which counts for one minute.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pier_coordinator.runs.pipeline import Drawing, PipelineRows
from pier_coordinator.runs.series import Series, rounded
from pier_coordinator.runs.sites import CURVES as SITE_CURVES
from pier_coordinator.runs.sites import IDLE, REVOKED, Links, Site
from pier_coordinator.runs.timings import LATEST, RoundTimings, segment_of, slowness_in_words
from pier_coordinator.store.facts import Fact, number, text, whole
from pier_node.base.units import several
from pier_node.config.run import RunConfig
from pier_node.outer.schedule import learning_rate

WINDOW = 60.0
"""Seconds for which a sample counts."""

GRAIN = 1_000_000
"""Values are summed as integers, in millionths, so that a sum kept for weeks does not drift."""


class Latest:
    """The latest value of each site, and their sum and mean."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[float, int]] = {}
        self._sum = 0

    def take(self, node: str, time: float, value: float) -> None:
        """Take in a value from a site."""
        self.forget(node)
        grains = round(value * GRAIN)
        self._latest[node] = (time, grains)
        self._sum += grains
        self._expire(time)

    @property
    def sum(self) -> float:
        """The sum over all sites that reported a value in the last WINDOW seconds."""
        return self._sum / GRAIN

    @property
    def mean(self) -> float:
        """The mean over the same sites. Raises ZeroDivisionError if there are none."""
        return self.sum / len(self._latest)

    def forget(self, node: str) -> bool:
        """Drop a site's value; return whether it had one."""
        _, grains = self._latest.pop(node, (0.0, None))
        self._sum -= grains or 0
        return grains is not None

    def kept(self) -> list[tuple[str, float, int]]:
        """Node, time and millionths of each value, for a snapshot of the board."""
        return [(node, *value) for node, value in self._latest.items()]

    def restore(self, values: Iterable[tuple[str, float, int]]) -> None:
        """Take in what `kept` gave."""
        self._latest = {node: (time, grains) for node, time, grains in values}
        self._sum = sum(grains for _, grains in self._latest.values())

    def _expire(self, now: float) -> None:
        while True:
            node, (time, _) = next(iter(self._latest.items()))
            if now - time <= WINDOW:
                return
            self.forget(node)


def said(fact: Fact) -> str:
    """A fact in words; "" for facts that only feed curves and tables."""
    body = fact.body
    match fact.kind:
        case "run":
            return (
                f"run {text(body, 'name')}: {text(body, 'algorithm')}, {several(whole(body, 'rounds') or 0, 'round')}"
            )
        case "site":
            return f"started: Pier {text(body, 'version')} over {text(body, 'transport')}"
        case "order" | "note" | "event":
            return text(body, "text")
        case _:
            return ""


EVENTS = 500
SAMPLES = 20
"""Samples of text that are kept."""
POINTS = 480
PLACES = ("inner_step", "tokens", "round")
"""How far a site, or the run, has come."""
CURVES = (
    *("loss", "gradient_norm", "tokens_per_second", "validation_loss", "learning_rate"),
    *PLACES,
)
"""Curves of the whole run: the validation loss by round, the others by time. The last three also convert a time into
steps, tokens and rounds."""
MOST_SITES = 4096
FEW_SITES = 24
"""Up to this number of sites, the page gets every link and shows every site's rounds."""

INFO = 20
TOLD_BY_ROUNDS = ("inner_step", "loss", "tokens", "bytes_sent")
PLAIN = ("run", "round", "moved", "_told", "_trained")
"""Attributes of a board that a snapshot keeps as they are."""
PART = 1000
"""Links in a part of a snapshot."""


class ReadModel:
    """The board of a run.

    Args:
        clock: returns the time in seconds since the epoch.
        config: the run's configuration; None: it is not shown, and the learning rate is not known.

    Attributes:
        round: the newest round that a site has committed.
        moved: when the board heard of that round.
        now: returns the time in seconds since the epoch.
        started: since when sites may be heard; before, their silence says nothing.
        problem: why the coordinator's disk takes nothing; "" if it does.
    """

    def __init__(self, clock: Callable[[], float] = time.time, config: RunConfig | None = None) -> None:
        self.boot = secrets.token_hex(4)
        self.stamp = 0
        self.run: dict[str, Any] = {}
        self.sites: dict[str, Site] = {}
        self.links = Links()
        self._experts: dict[str, Any] | None = None
        self._experts_stamp = 0
        self.pipeline = PipelineRows()
        self.timeline = RoundTimings()
        self.curves = {name: Series(POINTS) for name in CURVES}
        self._config = config
        self._told = dict.fromkeys(PLACES, 0.0)
        """How far facts say that the run is. Curves are made of facts only: pulses are gone after a restart."""
        self.round = 0
        self.moved = 0.0
        self.problem = ""
        self._events: list[dict[str, Any]] = []
        self._samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES)
        self._speeds, self._losses, self._norms = Latest(), Latest(), Latest()
        self.now = clock
        self.started = clock()
        self._trained: tuple[float, float] | None = None
        """When the first and the last report of training were made, in seconds since the epoch."""

    # --- input ---------------------------------------------------------------------------------

    def apply(self, fact: Fact) -> None:
        """Take in a fact. Facts are accepted in any order and with any body; none is an error."""
        self.stamp += 1
        body = fact.body
        if fact.kind == "run":
            self.run = _run(body)
        site = self._site(fact.node)
        if site is not None:
            if fact.kind in ("site", "order"):
                site.lasting = self.stamp
            site.stamp = self.stamp
            if fact.kind not in ("order", "event"):  # these are about the site, and not from it
                site.heard = max(site.heard, min(fact.time, self.now()))
            self._of_site(site, fact)
        self._tell(fact, site)

    def _of_site(self, site: Site, fact: Fact) -> None:
        if site.ending == REVOKED and fact.kind in ("sample", "round"):  # it was under way when the site was revoked
            return
        match fact.kind:
            case "site":
                site.registered(fact.body)
            case "sample":
                self._sample(site, fact.time, fact.body)
                self._trains(fact.time)
            case "round":
                self._round(site, fact.time, fact.body)
                self._trains(fact.time)
            case "link":
                self.links.take(site.node, fact.body, self.stamp)
            case "note":
                site.lines.append((fact.time, whole(fact.body, "level") or 0, text(fact.body, "text")))
            case "order":
                site.activity = text(fact.body, "activity").lower().removeprefix("activity_")
                site.assignment = text(fact.body, "assignment")
            case "event":
                state = text(fact.body, "state")
                if state == REVOKED:
                    self._revoke(site)
                if state:
                    self._rest(site, fact.time)
                site.dropped = max(site.dropped, whole(fact.body, "dropped") or 0)

    def _trains(self, when: float) -> None:
        first, last = self._trained or (when, when)
        self._trained = min(first, when), max(last, when)

    def _revoke(self, site: Site) -> None:
        site.ending = REVOKED
        others = self._others()
        self.round = max((it.round for it in others), default=0)
        for key in ("inner_step", "round"):
            self._told[key] = max((it.told.get(key, 0.0) for it in others), default=0.0)
        self.links.revoke(site.node)
        self.pipeline.revoke(site.node, self.stamp)

    def _others(self) -> list[Site]:
        return [it for it in self.sites.values() if it.ending != REVOKED]

    def _measured(self, site: Site, body: Mapping[str, Any]) -> None:
        device = site.device
        site.measured(body)
        if site.device != device:
            site.lasting = self.stamp

    def _progress(self, site: Site, when: float, body: Mapping[str, Any]) -> None:
        for key in PLACES:
            if (place := number(body, key)) is not None:
                before, site.told[key] = site.told.get(key, 0.0), place
                self._told[key] = self._told[key] + place - before if key == "tokens" else max(self._told[key], place)
        for name, value in {**self._told, "learning_rate": self._learning_rate(self._told["inner_step"])}.items():
            self.curves[name].add(when, value, self.stamp)

    def _learning_rate(self, step: float) -> float | None:
        """The inner learning rate after so many steps; None: it is not known, or a program's own."""
        if self._config is None or self._config.program is not None:
            return None
        return learning_rate(max(0, int(step) - 1), self._config.inner)

    def _sample(self, site: Site, when: float, body: Mapping[str, Any]) -> None:
        self._measured(site, body)
        self._progress(site, when, body)
        if site.phase == "starting" and site.inner_step:
            site.phase = "training"
        for name in SITE_CURVES:
            value = number(body, name)
            unknown = name == "gradient_norm" and not value  # before its first step
            site.curves[name].add(when, None if unknown else value, self.stamp)
        speed, loss = number(body, "tokens_per_second"), number(body, "loss")
        if speed == 0:  # it does not train: its loss dates from when it did
            self._rest(site, when)
            return
        if speed is not None:
            self._speeds.take(site.node, when, speed)
            self.curves["tokens_per_second"].add(when, self._speeds.sum, self.stamp)
        if loss is not None:
            self._losses.take(site.node, when, loss)
            self.curves["loss"].add(when, self._losses.mean, self.stamp)
        if norm := number(body, "gradient_norm"):
            self._norms.take(site.node, when, norm)
            self.curves["gradient_norm"].add(when, self._norms.mean, self.stamp)

    def _rest(self, site: Site, when: float) -> None:
        """Take a site that no longer trains out of the run's speed and loss."""
        self._losses.forget(site.node)
        self._norms.forget(site.node)
        if self._speeds.forget(site.node):
            self.curves["tokens_per_second"].add(when, self._speeds.sum, self.stamp)

    def _state(self, site: Site) -> str:
        return site.state(self.now(), self.started, self.run.get("rounds") or 0)

    def _round(self, site: Site, when: float, body: Mapping[str, Any]) -> None:
        segment = segment_of(when, body)
        if segment is None:
            return
        known = {key: body[key] for key in TOLD_BY_ROUNDS if number(body, key) is not None}
        self._measured(site, known)
        self._reached(site, int(segment.round))
        self._progress(site, when, body)
        site.segments.add(segment)
        self.timeline.add(site.node, segment, self.stamp)
        self._sampled(site.node, int(segment.round), text(body, "sample"))
        measured = number(body, "validation_loss")
        if measured is not None:
            site.validation_loss = measured
            site.curves["validation_loss"].add(segment.round, measured, self.stamp)
            self.curves["validation_loss"].add(segment.round, measured, self.stamp)

    def _sampled(self, node: str, round: int, words: str) -> None:
        """Keep a sample of text. Replicas that are equal write the same after a round."""
        if words and (round, words) not in ((it["round"], it["text"]) for it in self._samples):
            self._samples.append({"round": round, "node": node, "text": words, "stamp": self.stamp})

    def pulse(self, node: str, pulse: Mapping[str, Any], alive: bool) -> None:
        """Take in a heartbeat. With `alive` False, the site's lease has expired, and `pulse` may be empty."""
        site = self._site(node)
        if site is None or site.ending == REVOKED:
            return
        self.stamp += 1
        site.stamp, site.alive = self.stamp, alive
        if not alive:
            return
        offset = number(pulse, "offset")
        site.heard = self.now()
        site.offset = site.offset if offset is None else offset
        site.phase = text(pulse, "phase").removeprefix("PHASE_").replace("_", " ").lower() or site.phase
        self._measured(site, pulse)
        self.pipeline.pulse(node, pulse, self.stamp, self.now())
        self._reached(site, whole(pulse, "round"))

    def planned(self, experts: Mapping[str, Any] | None) -> None:
        """Take in the plan of experts and its progress, if there is one, as the coordinator gives them for the page."""
        shown = None if experts is None else {**experts, "rows": [_rounded(row) for row in experts["rows"]]}
        if shown != self._experts:
            self.stamp += 1
            self._experts, self._experts_stamp = shown, self.stamp

    def drawn(self, drawing: Drawing) -> None:
        """Take in the drawing of paths that a site of a pipeline has planned."""
        self.stamp += 1
        self.pipeline.drawn(drawing, self.stamp)

    def _reached(self, site: Site, round: int | None) -> None:
        site.round = max(site.round, round or 0)  # an earlier round changes nothing
        if site.round > self.round:
            self.round, self.moved = site.round, self.now()

    def _site(self, node: str) -> Site | None:
        if node and node not in self.sites and len(self.sites) < MOST_SITES:
            self.sites[node] = Site(node, node[:12], lasting=self.stamp + 1)
        return self.sites.get(node)

    def _tell(self, fact: Fact, site: Site | None) -> None:
        text_of_it, level = said(fact), whole(fact.body, "level") or INFO
        if text_of_it and (fact.kind != "note" or level > INFO):  # other lines are in `lines_of` only
            node = site.node if site else ""
            event = {"number": fact.number, "time": fact.time, "node": node, "kind": fact.kind, "level": level}
            insort(self._events, event | {"text": text_of_it, "stamp": self.stamp}, key=lambda it: it["time"])
            del self._events[:-EVENTS]

    # --- snapshots -----------------------------------------------------------------------------

    def parts(self) -> Iterator[dict[str, Any]]:
        """What the facts until now amount to, in parts that `restore` takes in. No fact may be applied meanwhile.

        Values are those of JSON, and copies of arrays. Of pulses only what facts tell, too, is in it.
        """
        yield {
            **{key: getattr(self, key) for key in PLAIN},
            "events": list(self._events),
            "samples": list(self._samples),
            "timeline": self.timeline.kept(),
            "curves": {name: curve.kept() for name, curve in self.curves.items()},
            **{key: latest.kept() for key, latest in self._latest().items()},
            "revoked": [site.node for site in self.sites.values() if site.ending == REVOKED],
        }
        links = self.links.kept()
        for at in range(0, len(links), PART):
            yield {"links": links[at : at + PART]}
        for site in self.sites.values():
            yield {"site": site.kept()}

    def restore(self, part: dict[str, Any]) -> None:
        """Take in a part of a snapshot; the parts must come in their order, before any fact."""
        self.stamp += 1
        if "site" in part:
            site = Site.restored(part["site"], self.stamp)
            self.sites[site.node] = site
        elif "links" in part:
            self.links.restore(part["links"], self.stamp)
        else:
            self._restore_run(part)

    def _restore_run(self, part: dict[str, Any]) -> None:
        for key in PLAIN:
            setattr(self, key, part.get(key, getattr(self, key)))
        self._events = [event | {"stamp": self.stamp} for event in part["events"]]
        self._samples.extend(sample | {"stamp": self.stamp} for sample in part["samples"])
        self.timeline = RoundTimings.restored(part["timeline"], self.stamp)
        for name, curve in part["curves"].items():
            self.curves[name] = Series.restored(POINTS, curve, self.stamp)
        for key, latest in self._latest().items():
            latest.restore(part[key])
        for node in part["revoked"]:
            self.links.revoke(node)

    def _latest(self) -> dict[str, Latest]:
        return {"speeds": self._speeds, "losses": self._losses, "norms": self._norms}

    # --- output --------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """The whole board, for JSON."""
        return self.changes(0)

    def changes(self, since: int) -> dict[str, Any]:
        """Everything that changed after a stamp, for JSON."""
        self.refresh()
        few = len(self.sites) <= FEW_SITES
        return {
            "boot": self.boot,
            "stamp": self.stamp,
            "full": since == 0,
            "now": self.now(),
            "run": self.run,
            "config": self._config_shown() if since == 0 else None,
            "totals": self.totals(),
            "sites": self.rows(since),
            "events": self.events(since),
            "curves": {name: curve.points(since) for name, curve in self.curves.items()},
            "rounds": self.timeline.rows(since),
            "samples": [it for it in self._samples if it["stamp"] > since],
            "links": self.links.rows(since) if few else [],
            "experts": self._experts if self._experts_stamp > since else None,
            "pipeline": self.pipeline.changes(since, self.name),
        }

    def _config_shown(self) -> dict[str, Any] | None:
        """The configuration as the page shows it: sections, and in them keys and values; of tensors their number."""
        if self._config is None:
            return None
        sections: dict[str, Any] = json.loads(self._config.canonical())
        for section in (sections.get("program"), sections["model"].get("transformers")):
            if section:
                section["tensors"] = f"{len(section['tensors'])} names and shapes"
        shown: dict[str, Any] = {}
        for name, section in sections.items():
            if isinstance(section, dict):
                shown[name] = {key: value for key, value in section.items() if not isinstance(value, dict)}
                shown |= {f"{name}.{key}": value for key, value in section.items() if isinstance(value, dict)}
        return shown

    def refresh(self) -> None:
        """Update the state of every site: a site's state also changes when it has been silent for too long."""
        for site in self.sites.values():
            state = self._state(site)
            if state != site.shown:
                self.stamp += 1
                site.shown, site.stamp = state, self.stamp

    def rows(self, since: int = 0) -> list[dict[str, Any]]:
        """The sites that changed after a stamp as rows of the page's table, by name."""
        changed = sorted((site for site in self.sites.values() if site.stamp > since), key=_by_name)
        return [site.row(self.round, self.links.uplink(site.node), since) for site in changed]

    def totals(self) -> dict[str, Any]:
        """The totals of the run."""
        live = self.live()
        moving = [site for site in live if site.phase != "paused"]
        duration = self.round_seconds()
        left = max(0, (self.run.get("rounds") or 0) - self.round) if moving else 0
        step = max((site.inner_step or 0 for site in self._others()), default=0)
        return {
            "round": self.round,
            "sites": len(self.known()),
            "alive": len(live),
            "paused": len(live) - len(moving),
            "tokens": sum(site.tokens or 0 for site in self.sites.values()),
            "inner_step": step,
            "learning_rate": rounded(self._learning_rate(step)),
            "tokens_per_second": rounded(sum(site.speed or 0 for site in moving)),
            "loss": rounded(self._loss(live)),
            "validation_loss": rounded(self.curves["validation_loss"].last()),
            "bytes_sent": sum(site.bytes_sent or 0 for site in self.sites.values()),
            "round_seconds": rounded(duration),
            "seconds": rounded(self._trained[1] - self._trained[0]) if self._trained else None,
            "seconds_left": rounded(duration * left) if duration and left else None,
        }

    def _loss(self, live: list[Site]) -> float | None:
        """The mean of the training losses that the table of sites shows: of those that train, else of all."""
        training = [site.loss for site in live if site.shown not in IDLE and site.loss is not None]
        last = training or [site.loss for site in self.known() if site.loss is not None]
        return sum(last) / len(last) if last else None

    def known(self) -> list[Site]:
        """All sites that ever joined, except revoked ones."""
        return [site for site in self.sites.values() if site.shown != REVOKED]

    def live(self) -> list[Site]:
        """Sites that were live at the last refresh."""
        return [site for site in self.sites.values() if site.shown not in ("silent", "left", "done", REVOKED)]

    def round_seconds(self) -> float | None:
        """The current duration of a round, in seconds; None before the first round."""
        recent = [segment.duration for site in self.live()[:FEW_SITES] for segment in site.segments.last(10)]
        return sum(recent) / len(recent) if recent else None

    def events(self, since: int = 0, after: int = 0) -> list[dict[str, Any]]:
        """Events after a stamp and with a number above `after` (0: any number), ordered by time."""
        return [
            {**event, "name": self.name(event["node"])}
            for event in self._events
            if event["stamp"] > since and (after == 0 or event["number"] > after)
        ]

    def name(self, node: str) -> str:
        """The name of a site."""
        site = self.sites.get(node)
        return site.name if site else node[:12]

    def curves_of(self, nodes: Iterable[str], since: int = 0) -> dict[str, Any]:
        """The curves of some sites, in the form that `changes` gives those of the run."""
        known = [self.sites[node] for node in nodes if node in self.sites]
        return {site.node: {name: it.points(since) for name, it in site.curves.items()} for site in known}

    def lines_of(self, node: str) -> list[tuple[float, int, str]]:
        """The last lines of a site's log: when, level as of Python's logging, text."""
        return list(self.sites[node].lines) if node in self.sites else []

    def rounds_of(self, first: int, last: int, nodes: Iterable[str] = ()) -> dict[str, Any]:
        """Rounds first .. last of the named sites, or of the busiest ones, and a text that says which site was slow."""
        named = sorted(self.sites.values(), key=_by_name)
        busy = {site.node: time for site in named if (time := site.segments.busy(first, last))}
        busiest = [*busy] if len(busy) <= FEW_SITES else sorted(busy, key=lambda node: -busy[node])[:FEW_SITES]
        shown = [node for node in nodes if node in busy] or busiest
        others = [*busy][:: max(1, len(busy) // FEW_SITES)]  # to compare all would take too long
        by_node = {node: self.sites[node].segments.between(first, last) for node in {*shown, *others}}
        names = {node: site.name for node, site in self.sites.items()}
        words = slowness_in_words(by_node, names, {node: self.links.uplink(node) for node in by_node})
        return {
            "words": words,
            "oldest": max(1, self.round - LATEST + 1),
            "sites": [
                {
                    "node": node,
                    "name": self.name(node),
                    "segments": [[round(it, 3) for it in row] for row in by_node[node]],
                }
                for node in shown
            ],
        }


def _by_name(site: Site) -> list[str | int]:
    """The key that puts lab-2 before lab-10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", site.name)]


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: rounded(value) if isinstance(value, float) else value for key, value in row.items()}


def _run(body: Mapping[str, Any]) -> dict[str, Any]:
    texts = {key: text(body, key) for key in ("name", "run_hash", "algorithm", "codec")}
    counts = ("rounds", "total_steps", "sites", "inner_steps", "stages", "parameters")
    return {**texts, **{key: whole(body, key) for key in counts}}
