"""Sites and experts of the paper's size, and domains whose law is known."""

from __future__ import annotations

import numpy as np

from pier_coordinator.experts.allocation import Fits
from pier_coordinator.experts.difficulty import Curves, Difficulty, Gain, size_gain, step_gain
from pier_coordinator.experts.scheduling import Places, Problem, loads
from pier_coordinator.experts.task import Domain, Site, Size, Task

TERA = 1e12
SPEEDS = [30 * TERA, 60 * TERA, 90 * TERA]
SITES = [Site(name, speed) for name, speed in zip("abc", SPEEDS)]
STEP = 42 * 2 * 8 * 1024
"""Tokens of a step of the paper: 688 128."""
FLOPS = {"S": 1.255e9, "M": 1.383e9, "L": 1.510e9}
SIZES = tuple(
    Size(name, parameters * 1e6, FLOPS[name], memory * 1e9, 6e8)
    for name, parameters, memory in (("S", 92.03, 4.6), ("M", 113.27, 5.0), ("L", 134.5, 5.3))
)


def job(size: str, steps: int) -> float:
    """FLOPs of an expert of the paper."""
    return FLOPS[size] * steps * STEP


def uniform(*jobs: float) -> Problem:
    """Experts that may go to any of the three sites."""
    return Problem.uniform(jobs, SPEEDS)


def task(domains: int = 3, **more: object) -> Task:
    """The paper's, with texts that are long enough."""
    texts = tuple(Domain(f"d{index}", 1.0, 1e12) for index in range(domains))
    given: dict[str, object] = {"sizes": SIZES, "steps": (300, 400, 500), "step_tokens": STEP, **more}
    return Task(texts, **given)  # type: ignore[arg-type]


def everywhere(domains: int) -> Fits:
    """All sizes fit somewhere."""
    return np.ones((domains, len(SIZES)), bool)


def curves(domains: int, seed: int = 0) -> Curves:
    """A law of which domains have different parts."""
    random = np.random.default_rng(seed)
    size, data = random.uniform(50, 500, domains), random.uniform(50, 500, domains)
    return Curves(random.uniform(1, 2, domains), size, data, 0.34, 0.28, 1e8)


def difficulty(asked: Task, law: Curves, noise: float = 0.0) -> Difficulty:
    """What estimating would find of a law, if it made no mistake, or one of this size."""
    random = np.random.default_rng(1)
    gains = []
    for gain in (size_gain, step_gain):
        value = gain(law, asked.choice, asked.weights)
        gains.append(Gain(value, value * (1 + noise * random.standard_normal((50, len(value))))))
    loss = law.loss(asked.choice.parameters[0], asked.choice.tokens[1])
    return Difficulty(law, loss, *gains)


def is_valid(problem: Problem, places: Places) -> bool:
    """Whether every job is where it may be and no site works beyond its window."""
    allowed = problem.eligible[np.arange(len(places)), np.array(places, dtype=np.intp)].all()
    return bool(allowed) and bool((loads(problem, places) <= problem.windows * (1 + 1e-9)).all())
