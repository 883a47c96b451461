"""What people are told of facts, in words."""

from __future__ import annotations

from pier_coordinator.facts import Fact
from pier_coordinator.fields import text, whole
from pier_node.units import several


def said(fact: Fact) -> str:
    """A fact in words; "" for those that only curves are made of."""
    body = fact.body
    match fact.kind:
        case "run":
            return (
                f"run {text(body, 'name')}: {text(body, 'algorithm')}, {several(whole(body, 'rounds') or 0, 'round')}"
            )
        case "site":
            return f"started: Pier {text(body, 'version')} over {text(body, 'transport')} at {text(body, 'address')}"
        case "order" | "note" | "event":
            return text(body, "text")
        case _:
            return ""
