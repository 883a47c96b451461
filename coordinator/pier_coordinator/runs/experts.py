"""Experts as the page shows them: which site trains what, its progress and its result, built from facts.

A "plan" fact says what is to be trained and where; it is repeated whenever an expert moves to another site. "expert"
facts hold what sites report about their experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pier_coordinator.runs.series import rounded
from pier_coordinator.store.facts import amount, number, text, whole

MOST = 256
"""Maximum number of experts kept of a plan."""
WAITING, TRAINING, ACCEPTED, REFUSED, NOBODY = "waiting", "training", "accepted", "refused", "nobody"


@dataclass
class ExpertRow:
    """One expert.

    Attributes:
        node: node id of the site that trains it; "": no site can.
        seconds: planned training time at that site.
        done: number of steps done.
        loss: bits per byte; during training that of the last step's text, afterwards that of the dev split.
        parent_loss: loss of the parent on the dev split, bits per byte.
        error: standard error of the difference between the two losses, bits per byte.
    """

    number: int
    domain: str
    size: str
    steps: int
    node: str
    seconds: float
    state: str = WAITING
    done: int = 0
    loss: float | None = None
    parent_loss: float | None = None
    error: float | None = None

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> ExpertRow:
        """Build it from the plan's fact."""
        node, steps = text(body, "node"), max(1, whole(body, "steps") or 1)
        row = cls(whole(body, "number") or 0, text(body, "domain"), text(body, "size"), steps, node, 0.0)
        row.seconds, row.state = amount(body, "planned_seconds"), WAITING if node else NOBODY
        row.done = min(steps, whole(body, "done") or 0)
        return row

    def told(self, body: Mapping[str, Any]) -> None:
        """Take in a report of its site."""
        if self.state in (ACCEPTED, REFUSED):
            return
        if body.get("done") is True:
            self.state, self.done = ACCEPTED if body.get("accepted") is True else REFUSED, self.steps
            self.loss, self.parent_loss = number(body, "loss"), number(body, "parent_loss")
            self.error = number(body, "standard_error")
        elif not text(body, "problem"):
            loss = number(body, "training_loss")
            self.state, self.done = TRAINING, min(self.steps, whole(body, "step") or 0)
            self.loss = None if loss is None else loss / math.log(2)

    def shown(self, name: str) -> dict[str, Any]:
        """The row for JSON; `name` is the name of its site."""
        plain = {key: getattr(self, key) for key in ("number", "domain", "size", "steps", "node", "state", "done")}
        losses = {key: rounded(getattr(self, key)) for key in ("seconds", "loss", "parent_loss", "error")}
        return {**plain, **losses, "site": name}


class ExpertRows:
    """The experts of the current plan.

    Attributes:
        stamp: stamp of the last change.
    """

    def __init__(self) -> None:
        self.stamp = 0
        self._plan, self._accepted, self._mode, self._seconds = "", 0.0, "", 0.0
        self._rows: dict[int, ExpertRow] = {}

    def planned(self, body: Mapping[str, Any], stamp: int) -> None:
        """Take in a plan that was accepted, or the current plan after an expert has moved to another site."""
        experts = body.get("experts")
        if not text(body, "plan") or not isinstance(experts, list):
            return
        again = (text(body, "plan"), amount(body, "accepted")) == (self._plan, self._accepted)
        before = self._rows if again else {}
        rows = [ExpertRow.of(each) for each in experts[:MOST] if isinstance(each, dict)]
        self._rows = {row.number: _kept(before.get(row.number), row) for row in rows}
        self._plan, self._accepted = text(body, "plan"), amount(body, "accepted")
        self._mode, self._seconds, self.stamp = text(body, "mode"), amount(body, "seconds"), stamp

    def heard(self, node: str, body: Mapping[str, Any], stamp: int) -> None:
        """Take in a site's report on an expert; a report on another site's expert is ignored."""
        row = self._rows.get(whole(body, "job") or 0)
        if row is not None and text(body, "plan") == self._plan and row.node == node:
            row.told(body)
            self.stamp = stamp

    def changes(self, since: int, name: Callable[[str], str]) -> dict[str, Any] | None:
        """The plan for JSON, its experts in the order in which sites train them; None: no change since that stamp.

        Args:
            name: gives the name of a site by its node id.
        """
        if self.stamp <= since or not self._rows:
            return None
        rows = [row.shown(name(row.node) if row.node else "") for row in self._rows.values()]
        return {"plan": self._plan, "mode": self._mode, "seconds": rounded(self._seconds), "rows": rows}


def _kept(before: ExpertRow | None, now: ExpertRow) -> ExpertRow:
    """The old row with the new planned time; if the expert moved to another site, the new row."""
    if before is None or before.node != now.node:
        return now
    before.seconds = now.seconds
    return before
