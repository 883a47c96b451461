"""Evaluation of a plan's experts: what each site is asked to score, the sheets that have arrived, what is given up.

Models stay at their sites. A site is asked to score its experts as soon as they are done. Sheets are checked before
they are kept, and every wait has a limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pier_coordinator.store.experts import AcceptedPlan, Expert
from pier_coordinator.store.sites import Refused
from pier_node.base.errors import PierError
from pier_node.experts.sheet import ENDING, SCORED, ScoredDomain, ScoringOrder, Sheet, load_sheet, unpacked


@dataclass
class ScoredExpert:
    """One expert of the ensemble.

    Attributes:
        domain: its domain.
        node: node id of the site that has it; "": no site can train it.
        name: name of its folder there; "": it is not done yet.
        weights: SHA-256 of its weights, hex; "": not known, because its parent stands in for it.
        wanted: domains and splits whose sheets have not arrived.
        problem: why it was given up; "": it was not.
        heard: when something last arrived for it, or could not have; seconds on any monotonic clock.
    """

    domain: str
    node: str
    name: str = ""
    weights: str = ""
    wanted: set[tuple[str, str]] = field(default_factory=set)
    problem: str = ""
    heard: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether nothing more is expected."""
        return not self.wanted or bool(self.problem)


class Scoring:
    """One evaluation of an ensemble.

    Args:
        domains: the domains to score.
        rows: maximum number of rows per domain and split; 0: all.
        patience: seconds after which an expert is given up if nothing arrives for it.
        folder: where sheets are kept.
    """

    def __init__(
        self,
        id: str,
        experts: Iterable[ScoredExpert],
        domains: Sequence[ScoredDomain],
        rows: int,
        patience: float,
        folder: Path,
    ) -> None:
        self.id, self.folder, self._patience, self._rows = id, folder, patience, rows
        self._domains, self.experts = tuple(domains), [*experts]
        self.left_out: dict[str, str] = {}
        names = [each.section.name for each in domains]
        for expert in self.experts:
            expert.wanted = {(name, split) for name in names for split in SCORED}

    @classmethod
    def of(
        cls,
        plan: AcceptedPlan,
        accepted: float,
        extra: Sequence[ScoredDomain],
        rows: int,
        patience: float,
        folder: Path,
    ) -> Self:
        """The evaluation of a plan's experts on their domains and on extra ones, with a subfolder of its own."""
        own = [ScoredDomain(section=each.job.domain, digest=each.job.domain_hash) for each in plan.jobs]
        known = {each.section.name for each in own}
        domains = [*own, *(each for each in extra if each.section.name not in known)]
        id = scoring_id(plan.id, accepted, [each.model_dump_json() for each in domains], rows)
        experts = [ScoredExpert(plan.jobs[chain[-1]].job.domain.name, "") for chain in plan.chains()]
        return cls(id, experts, domains, rows, patience, folder / id)

    @property
    def finished(self) -> bool:
        """Whether nothing more is expected for any expert."""
        return all(expert.is_over for expert in self.experts)

    def begin(self, now: float) -> None:
        """Take in the sheets that an earlier start left in the folder; blocks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for expert in self.experts:
            expert.heard = now
        for path in sorted(self.folder.glob(f"*{ENDING}")):
            try:
                sheet = load_sheet(path)
            except PierError:
                path.unlink()
                continue
            for expert in self.experts:
                if expert.domain == sheet.subject.expert and expert.weights in ("", sheet.subject.weights):
                    expert.wanted.discard((sheet.subject.domain, sheet.subject.split))

    def order(self, node: str) -> ScoringOrder | None:
        """What a site is asked to score; None: nothing."""
        names = tuple(each.name for each in self.experts if each.node == node and each.name and not each.is_over)
        if not names or self.finished:
            return None
        return ScoringOrder(id=self.id, experts=names, domains=self._domains, rows=self._rows)

    def follow(self, jobs: Iterable[Expert], now: float) -> None:
        """Take in the current state of these jobs: where their experts are, and whether they are done."""
        for job in jobs:
            result = job.result or {}
            # If an expert was refused, its parent is scored, whose weights the coordinator does not know.
            weights = result.get("weights", "") if result.get("accepted") else ""
            self.done(job.job.domain.name, job.node, result.get("name", ""), weights, now)

    def done(self, domain: str, node: str, name: str, weights: str, now: float) -> None:
        """Take in where an expert is, and its name and weights once it is done."""
        for expert in self.experts:
            if expert.domain == domain:
                expert.node, expert.name, expert.weights, expert.heard = node, name, weights, now

    def take(self, node: str, name: str, content: bytes, now: float) -> None:
        """Take a sheet from a site; blocks. Raises Refused: it was not asked for, or is not what it claims to be."""
        expert = self._expert(node, name)
        try:
            sheet = unpacked(content)
        except ValueError as error:
            raise Refused(f"not a score sheet: {error}") from error
        self._check(expert, sheet)
        if (sheet.subject.domain, sheet.subject.split) not in expert.wanted:
            return  # it is here already; our reply was lost
        sheet.save(self.folder)
        expert.heard = now
        expert.wanted.discard((sheet.subject.domain, sheet.subject.split))

    def cannot(self, node: str, name: str, domain: str, problem: str, now: float) -> None:
        """Record that a site cannot score an expert on a domain ("": on any). Raises Refused: it was not asked to."""
        expert = self._expert(node, name)
        if domain and not self._is_scored(domain):
            raise Refused(f"this site was not asked to score an expert on {domain}")
        expert.heard = now
        if domain:
            self.left_out.setdefault(domain, f"the expert of {expert.domain} is not scored on it: {problem}")
            expert.wanted -= {(domain, split) for split in SCORED}
        else:
            expert.problem = problem

    def look(
        self, now: float, alive: Callable[[str], bool], called: Callable[[str], str], revoked: Collection[str] = ()
    ) -> bool:
        """Give up experts for which nothing arrives; return whether any was. An expert in training is not given up."""
        waiting = [expert for expert in self.experts if not expert.is_over]
        for expert in waiting:
            if not expert.node:
                expert.problem = "no site can train it"
            elif expert.node in revoked:
                expert.problem = f"{called(expert.node)} is not of the run any more"
            elif not expert.name and alive(expert.node):
                expert.heard = now
            elif now - expert.heard >= self._patience:
                silent = "nothing came of it" if alive(expert.node) else "is not there"
                expert.problem = f"{called(expert.node)}: {silent} for {self._patience:.0f} s"
        return any(expert.problem for expert in waiting)

    def told(self, alive: Callable[[str], bool], called: Callable[[str], str]) -> dict[str, Any]:
        """The progress, for people and scripts."""
        every = 2 * len(self._domains)
        experts = [
            {
                "domain": expert.domain,
                "site": called(expert.node) if expert.node else None,
                "there": bool(expert.node) and alive(expert.node),
                "trained": bool(expert.name),
                "sheets": every - len(expert.wanted),
                "of": every,
                "problem": expert.problem,
            }
            for expert in self.experts
        ]
        told = {"id": self.id, "finished": self.finished, "folder": str(self.folder), "experts": experts}
        return {**told, "left_out": self.left_out}

    def _expert(self, node: str, name: str) -> ScoredExpert:
        for expert in self.experts:
            if (expert.node, expert.name) == (node, name):
                return expert
        raise Refused("this site was not asked to score that expert")

    def _is_scored(self, domain: str) -> bool:
        return any(domain == each.section.name for each in self._domains)

    def _check(self, expert: ScoredExpert, sheet: Sheet) -> None:
        about = sheet.subject
        asked = self._is_scored(about.domain) and about.split in SCORED
        if about.expert != expert.domain or not asked:
            raise Refused(f"a sheet of {about.expert} on the {about.split} split of {about.domain} was not asked for")
        if expert.weights and about.weights != expert.weights:
            raise Refused(f"the sheet is of other weights than the expert of {expert.domain} has")
        if self._rows and len(sheet.rows) > self._rows:
            raise Refused(f"a sheet of {len(sheet.rows)} rows: {self._rows} were asked for")


def scoring_id(*terms: object) -> str:
    """The id of an evaluation, 32 hex digits: the same request for the same plan has the same id."""
    return hashlib.blake2b(repr(terms).encode(), digest_size=16).hexdigest()
