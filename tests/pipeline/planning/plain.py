"""The event simulator again, in plain Python, written from docs/paths.md and not from the compiled one.

With `gated` a slot's next wave waits until its last one has finished, and who has a lower slot goes first: that is how
the reference's own simulator comes to the check values of section 3. Ours does not gate, as the best known do not.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

from pier_node.pipeline.planning.plan import Plan
from pier_node.pipeline.planning.problem import Problem

TOGETHER = 1e-9
"""Seconds within which events happen at once."""


@dataclass
class Plain:
    """One iteration; `ran` has every task as (site, microbatch, step, start, end)."""

    problem: Problem
    plan: Plan
    gated: bool = False
    events: list[tuple[float, int, str, int, int, int]] = field(default_factory=list)
    ran: list[tuple[int, int, int, float, float]] = field(default_factory=list)

    def run(self) -> float:
        """The makespan; infinite when memory blocks for ever."""
        sites, self.places = self.problem.sites, [site.memory for site in self.problem.sites]
        self.busy, self.line = [False] * len(sites), [0.0] * len(sites)
        self.ready: list[list[tuple[float, int, int]]] = [[] for _ in sites]
        self.wave = [number for number, wave in enumerate(self.plan.waves) for _ in wave]
        self.slot = [rank for wave in self.plan.waves for rank in _ranks([path[0] for path in wave])]
        for it, number in enumerate(self.wave):
            if number == 0 or not self.gated:
                self.push(self.release(it), "arrival", self.plan.paths[it][0], it, 0)
        while self.events:
            now, touched = self.events[0][0], set()
            while self.events and self.events[0][0] <= now + TOGETHER:
                at, _, kind, site, it, step = heapq.heappop(self.events)
                touched |= self.happen(at, kind, site, it, step)
            for site in sorted(touched):
                self.dispatch(site, now)
        done = len(self.ran) == len(self.plan.paths) * (2 * self.problem.path_length + 1)
        return max(end for *_, end in self.ran) if done else float("inf")

    def release(self, it: int) -> float:
        origin = self.problem.sites[self.plan.paths[it][0]]
        return self.problem.wave_s * self.wave[it] + self.slot[it] * origin.forward_s

    def push(self, at: float, kind: str, site: int, it: int, step: int) -> None:
        heapq.heappush(self.events, (at, len(self.ran), kind, site, it, step))

    def happen(self, at: float, kind: str, site: int, it: int, step: int) -> set[int]:
        length, path = self.problem.path_length, self.plan.paths[it]
        if kind == "arrival":
            self.ready[site].append((at, it, step))
        elif kind == "idled":
            self.busy[site] = False
        else:
            if step > length:
                self.places[site] += 1
            gap = self.problem.task_gap_s if step else self.problem.first_gap_s
            self.push(at + gap, "idled", site, it, step)
            if step < 2 * length:
                to = (*path, path[0], *reversed(path))[step + 1]
                leaves = max(at, self.line[site])
                self.line[site] = leaves + (self.problem.uplink_s[site] if self.problem.uplink_s else 0.0)
                self.push(leaves + self.problem.transfer_s[site][to], "arrival", to, it, step + 1)
            elif self.gated and (after := self.following(it)) is not None:
                self.push(max(at, self.release(after)), "arrival", site, after, 0)
            return set()
        return {site}

    def following(self, it: int) -> int | None:
        own = self.plan.paths[it][0], self.wave[it] + 1, self.slot[it]
        keys = [(path[0], self.wave[other], self.slot[other]) for other, path in enumerate(self.plan.paths)]
        return keys.index(own) if own in keys else None

    def dispatch(self, site: int, now: float) -> None:
        length, times = self.problem.path_length, self.problem.sites[site]
        able = [it for it in self.ready[site] if it[2] >= length or self.places[site] > 0]
        if self.busy[site] or not able:
            return
        chosen = min(able, key=self.priority)
        self.ready[site].remove(chosen)
        self.busy[site] = True
        _, it, step = chosen
        took = times.forward_s if step < length else times.loss_s if step == length else times.backward_s
        self.places[site] -= step < length
        self.ran.append((site, it, step, now, now + took))
        self.push(now + took, "end", site, it, step)

    def priority(self, task: tuple[float, int, int]) -> tuple[float, ...]:
        arrival, it, step = task
        if self.gated:
            return step == 0, self.slot[it], round(arrival, 6), self.plan.paths[it][0], it
        return step == 0, self.wave[it], round(arrival, 8), it


def _ranks(origins: list[int]) -> list[int]:
    seen: Counter[int] = Counter()
    ranks = []
    for origin in origins:
        ranks.append(seen[origin])
        seen[origin] += 1
    return ranks
