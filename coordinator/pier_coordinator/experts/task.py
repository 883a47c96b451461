"""The planning task: domains, the sizes and step counts that experts may have, sites, and a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pier_coordinator.experts.difficulty import ESTIMATED, Choice, Classes
from pier_node.experts.mixture import Array

MIDDLE = 1
"""Index of the medium size and of the usual number of steps."""


@dataclass(frozen=True)
class Domain:
    """A text that an expert is trained on.

    Attributes:
        weight: v_j, the weight of its loss.
        tokens: D_j, the number of tokens to train on.
        judged: number of tokens that its expert and, before it, its parent are judged on.
        sent: bytes that a site must fetch for it; 0: every site has the text.
        sites: names of the sites that may see it; empty: all sites.
        difficulty: its class if that is set by hand.
    """

    name: str
    weight: float
    tokens: float
    judged: float = 0.0
    sent: float = 0.0
    sites: frozenset[str] = frozenset()
    difficulty: int = ESTIMATED


@dataclass(frozen=True)
class Size:
    """A size that an expert may have.

    Attributes:
        parameters: number of parameters of the model.
        flops: training FLOPs per token (the node's trainer/model/cost.py).
        memory: minimum bytes that training needs.
        stored: bytes of its weights when they are sent.
    """

    name: str
    parameters: float
    flops: float
    memory: float
    stored: float


@dataclass(frozen=True)
class Site:
    """A site; a value that is not known or does not matter is inf.

    Attributes:
        speed: FLOP/s measured in training, never the peak.
        memory: bytes.
        line: bytes/s.
        window: seconds for which it is available.
    """

    name: str
    speed: float
    memory: float = math.inf
    line: float = math.inf
    window: float = math.inf


@dataclass(frozen=True)
class Task:
    """What to plan.

    Attributes:
        sizes: small, medium and large, by FLOPs.
        steps: fewest, usual and most steps.
        step_tokens: tokens per step.
        budget: FLOPs of the domain phase; 0: as many as with the medium size and the usual steps for all domains.
        horizon: seconds in which all sites must be done without idling, instead of a budget; 0: no horizon.
        max_epochs: maximum number of times that a domain's text may be seen.
        setup: seconds per domain besides training and judging, for starting workers and reading text.
        chain: one expert trains on the domains of a class one after the other; otherwise each domain has its own.
    """

    domains: tuple[Domain, ...]
    sizes: tuple[Size, Size, Size]
    steps: tuple[int, int, int]
    step_tokens: int
    budget: float = 0.0
    horizon: float = 0.0
    max_epochs: float = 4.0
    setup: float = 0.0
    chain: bool = False

    @cached_property
    def weights(self) -> Array:
        """v_j with mean 1, [domains]."""
        found = np.array([domain.weight for domain in self.domains])
        return np.asarray(found / found.mean())

    @cached_property
    def given(self) -> Classes:
        """Classes of difficulty set by hand, [domains]."""
        return np.array([domain.difficulty for domain in self.domains])

    @cached_property
    def choice(self) -> Choice:
        """The sizes and step counts as arrays."""
        parameters, flops = (np.array([getattr(size, key) for size in self.sizes]) for key in ("parameters", "flops"))
        return Choice(parameters, flops, np.array(self.steps, dtype=np.float64) * self.step_tokens)

    @cached_property
    def most(self) -> Array:
        """Maximum tokens that a domain's expert may see, repetitions included, [domains]."""
        return np.array([domain.tokens for domain in self.domains]) * self.max_epochs

    @property
    def homogeneous(self) -> float:
        """FLOPs of the medium size and the usual steps for every domain."""
        return len(self.domains) * self.sizes[MIDDLE].flops * self.steps[MIDDLE] * self.step_tokens
