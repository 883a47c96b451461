"""Problems to plan: small ones that can be seen through, and any."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from pier_node.pipeline.planning.problem import Matrix, Problem, Rules, Site, stage_sizes

SOME = settings(max_examples=40, deadline=None)


def site(name: str, forward_s: float = 1.0, memory: int = 2) -> Site:
    return Site(name, forward_s, 1.5 * forward_s, 0.25 * forward_s, memory)


def even(count: int, seconds: float) -> Matrix:
    """All links alike."""
    return tuple(tuple(0.0 if a == b else seconds for b in range(count)) for a in range(count))


def problem(count: int = 6, stages: int = 3, path_length: int = 2, link_s: float = 0.5, **changes: Any) -> Problem:
    """Equal sites on equal links, two microbatches in flight at each, in two waves."""
    sizes = (count // stages,) * stages
    keys = {
        "sites": tuple(site(f"s{index}") for index in range(count)),
        "transfer_s": even(count, link_s),
        "stage_sizes": sizes,
        "path_length": path_length,
        "microbatches": 4 * sizes[0],
        "waves": 2,
        **changes,
    }
    return Problem(**keys)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any that has a plan: sites unequally fast, links unequal in both directions, memory to spare or not."""
    stages = draw(st.integers(2, 5))
    length, count = draw(st.integers(2, stages)), draw(st.integers(stages, 10))
    sizes, waves, places = stage_sizes(count, stages, length), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    visits = places * min(sizes[0], *(size * (stages - 1) // (length - 1) for size in sizes[1:]))
    dice = random.Random(draw(st.integers(0, 1 << 32)))

    def times() -> tuple[float, ...]:
        return tuple(dice.randint(1, 40) / 10 for _ in range(count))

    return Problem(
        sites=tuple(site(f"s{at}", forward, places + dice.randint(0, 1)) for at, forward in enumerate(times())),
        transfer_s=tuple(times() for _ in range(count)),
        stage_sizes=sizes,
        path_length=length,
        microbatches=waves * max(1, visits - draw(st.integers(0, 1))),
        waves=waves,
        rules=Rules(max_swaps=draw(st.integers(0, 1)), max_jump=stages),
        task_gap_s=draw(st.sampled_from([0.0, 0.1])),
        first_gap_s=draw(st.sampled_from([0.0, 0.1])),
        wave_s=draw(st.sampled_from([0.0, 2.5])),
        uplink_s=times() if draw(st.booleans()) else (),
    )
