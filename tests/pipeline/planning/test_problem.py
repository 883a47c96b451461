from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from pipeline.planning.cases import even, problem, site

from pier_node.base.errors import PierError
from pier_node.pipeline.planning.problem import Rules, even_parts, stage_sizes


@pytest.mark.parametrize(
    ("sites", "stages", "length", "expected"),
    [
        (20, 6, 4, (5, 3, 3, 3, 3, 3)),
        (18, 4, 3, (6, 4, 4, 4)),
        (42, 8, 6, (7, 5, 5, 5, 5, 5, 5, 5)),
        (15, 6, 3, (5, 2, 2, 2, 2, 2)),
        (9, 4, 3, (3, 2, 2, 2)),
        (20, 6, 6, (3, 3, 3, 3, 3, 3)),
        (5, 5, 2, (1, 1, 1, 1, 1)),
    ],
)
def test_sites_for_each_stage(sites: int, stages: int, length: int, expected: tuple[int, ...]) -> None:
    assert stage_sizes(sites, stages, length) == expected


def test_fewer_sites_than_stages() -> None:
    with pytest.raises(PierError, match="3 sites cannot hold 4 stages"):
        stage_sizes(3, 4, 2)


def test_waves_are_equal_within_one() -> None:
    assert even_parts(10, 4) == (3, 3, 2, 2)
    assert problem(microbatches=7).wave_sizes == (4, 3)


def test_its_title() -> None:
    assert problem(microbatches=8, path_length=2).title == "8 microbatches through 2 of 3 stages"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"sites": ()}, "0 sites"),
    ({"sites": (site("a"),) * 6}, "two sites are called a"),
    ({"sites": tuple(site(f"s{index}", 0.0) for index in range(6))}, "forward_s of s0 is 0"),
    ({"sites": tuple(site(f"s{index}", math.nan) for index in range(6))}, "forward_s of s0 is nan"),
    ({"sites": (replace(site("s0"), loss_s=-1.0), *(site(f"s{at}") for at in range(1, 6)))}, "loss_s of s0 is -1"),
    ({"sites": tuple(site(f"s{index}", memory=0) for index in range(6))}, "memory of s0 is 0"),
    ({"transfer_s": even(5, 1.0)}, "transfer_s has 5 rows for 6 sites"),
    ({"transfer_s": (*even(6, 1.0)[:5], (1.0,))}, r"transfer_s\[5\] has 1 entries for 6 sites"),
    ({"transfer_s": even(6, math.inf)}, r"transfer_s\[0\]\[1\] is inf"),
    ({"gradient_s": even(6, -1.0)}, r"gradient_s\[0\]\[1\] is -1"),
    ({"uplink_s": (1.0,)}, "uplink_s has 1 entries for 6 sites"),
    ({"task_gap_s": math.nan}, "task_gap_s is nan"),
    ({"max_intra_s": -1.0}, "max_intra_s is -1"),
    ({"stage_sizes": (6,)}, "1 stages"),
    ({"stage_sizes": (3, 3, 0)}, "Every stage needs a site"),
    ({"stage_sizes": (3, 3, 3)}, r"stages of \[3, 3, 3\] sites need 9, there are 6"),
    ({"path_length": 4}, "path_length 4 with 3 stages"),
    ({"path_length": 1}, "path_length 1 with 3 stages"),
    ({"microbatches": 0}, "0 microbatches"),
    ({"waves": 0}, "0 waves of 8 microbatches"),
    ({"waves": 9}, "9 waves of 8 microbatches"),
    ({"rules": Rules(max_jump=0)}, "rules.max_jump is 0"),
    ({"rules": Rules(max_swaps=-1)}, "rules.max_swaps is -1"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_cannot_be_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PierError, match=said):
        problem(**changes)
