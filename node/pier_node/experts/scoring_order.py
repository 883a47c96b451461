"""An order to score: which experts of a site, on the text of which domains. What comes back is score sheets."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pier_node.config_section import Section
from pier_node.data.deal import Split
from pier_node.experts.card import Hash
from pier_node.experts.config import MOST_DOMAINS, DomainSection

SCORED: tuple[Split, ...] = ("prior", "test")
"""Splits of each domain that sheets are made of."""
MOST_SCORED = 2 * MOST_DOMAINS
"""Domains of an order: those that have an expert, and as many that have none."""


class ScoredDomain(Section):
    """A domain; `digest` is of the text that was planned with, "": of any."""

    section: DomainSection
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""


class ScoringOrder(Section):
    """What to score.

    Attributes:
        experts: their names, as of their cards.
        rows: of each domain and split, at most; 0: all.
    """

    id: Hash
    experts: Annotated[tuple[Hash, ...], Field(max_length=MOST_DOMAINS)]
    domains: Annotated[tuple[ScoredDomain, ...], Field(min_length=1, max_length=MOST_SCORED)]
    rows: Annotated[int, Field(ge=0, lt=2**31)] = 0
