"""What bench/goodput.py computes from the sites' commits: pure.

Goodput is the rate at which tokens get into the committed model, relative to that of the same sites without faults.
What was trained and lost with a site does not count.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any


@dataclass(frozen=True)
class Commit:
    """A round that a site committed.

    Attributes:
        time: seconds since the epoch.
        members: how many took part.
        tokens: in the model since the beginning.
        loss: of the last validation that the site made since it started, nats a token; NaN: none yet.
    """

    time: float
    round: int
    members: int
    tokens: int
    loss: float = math.nan


@dataclass(frozen=True)
class Fault:
    """A site is killed, so many seconds after the measurement began."""

    at: float
    site: int


def schedule(seed: int, sites: int, mean: float, seconds: float) -> list[Fault]:
    """Faults of `seconds`, in order: at each site at random, every `mean` seconds on average (a Poisson process)."""
    faults = []
    for site in range(sites):
        chance, at = random.Random(f"{seed}/{site}"), 0.0
        while (at := at + chance.expovariate(1 / mean)) < seconds:
            faults.append(Fault(at, site))
    return sorted(faults, key=lambda fault: fault.at)


@dataclass(frozen=True)
class Setting:
    """What trials under faults have in common; times are seconds.

    Attributes:
        mean: between two faults of a site, on average.
        overlap: outer.overlap of the run.
    """

    sites: int
    seconds: float
    mean: float
    seed: int
    overlap: bool

    def faults(self, victims: int = 0) -> list[Fault]:
        """The schedule, of the sites or of so many victims."""
        return schedule(self.seed, victims or self.sites, self.mean, self.seconds)


def tokens_at(commits: Iterable[Commit], when: float) -> int:
    """Tokens in the newest committed model at that time, at whichever site."""
    return max((commit.tokens for commit in commits if commit.time <= when), default=0)


def returns(commits: Sequence[Commit], killed: Sequence[float], end: float) -> list[float]:
    """Seconds from each kill of a site to its next commit; inf: killed again, or over, before there was one."""
    times = [commit.time for commit in commits]
    found = []
    for kill, until in pairwise([*killed, end]):
        at = bisect_right(times, kill)
        found.append(times[at] - kill if at < len(times) and times[at] <= until else math.inf)
    return found


@dataclass(frozen=True)
class Lives:
    """What is known of a site after the measurement: what it committed, when it was killed, how often it died."""

    commits: Sequence[Commit]
    killed: Sequence[float] = ()
    died: int = 0


@dataclass(frozen=True)
class Outcome:
    """A way to go on after faults, over `seconds`.

    Attributes:
        tokens: that got into the committed model.
        kills: of sites, by the bench.
        died: daemons that ended by themselves.
        rounds: committed.
        members: of a round, in the mean.
        back: median seconds from a site's kill to its next commit; inf: most were killed again before.
        quickest: the least of those seconds.
        longest: seconds without any commit, at most.
        load: of the machine at the end, over a minute; others' work on it included.
    """

    way: str
    seconds: float
    tokens: int
    kills: int
    died: int
    rounds: int
    members: float
    back: float
    quickest: float
    longest: float
    load: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def goodput(self, ideal: Outcome) -> float:
        """Its rate over that of the same sites without faults."""
        return self.rate / ideal.rate

    def record(self, ideal: Outcome) -> dict[str, Any]:
        """For JSON."""
        known = {name: None if value == math.inf else value for name, value in vars(self).items()}
        return {**known, "rate": self.rate, "goodput": self.goodput(ideal)}


def outcome(way: str, sites: Sequence[Lives], begun: float, ended: float, load: float) -> Outcome:
    """Of the sites' lives between two times."""
    everything = sorted((commit for site in sites for commit in site.commits), key=lambda commit: commit.time)
    within = {it.round: it for it in reversed(everything) if begun < it.time <= ended}
    back = [wait for site in sites for wait in returns(site.commits, site.killed, ended)]
    times = [begun, *sorted(it.time for it in within.values()), ended]
    return Outcome(
        way,
        seconds=ended - begun,
        tokens=tokens_at(everything, ended) - tokens_at(everything, begun),
        kills=len(back),
        died=sum(site.died for site in sites),
        rounds=len(within),
        members=fmean(it.members for it in within.values()) if within else 0.0,
        back=median(back) if back else math.inf,
        quickest=min(back, default=math.inf),
        longest=max(later - earlier for earlier, later in pairwise(times)),
        load=load,
    )


def undisturbed(sites: int, mean: float, recovery: float) -> float:
    """Part of the time in which none of `sites` sites was hit in the last `recovery` seconds: exp(−n·D/mean)."""
    return math.exp(-sites * recovery / mean)
