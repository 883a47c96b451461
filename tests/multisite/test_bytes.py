"""What goes over the lines is what the algorithm and its codec say."""

from __future__ import annotations

import math

import pytest
from multisite.world import RATES, MakeWorld

from pier_node.config.run import RunConfig
from pier_node.outer.codec import codec
from pier_node.outer.layout import Layout

pytestmark = pytest.mark.multisite

STEPS, ROUNDS = 100, 15


@pytest.mark.parametrize(
    "outer",
    [{"algorithm": "pier", "codec": "int8", "inner_steps": 10}, {"algorithm": "noloco", "codec": "none"}],
    ids=["pier int8", "noloco"],
)
def test_bytes_sent_are_those_that_are_predicted(world: MakeWorld, outer: dict[str, object]) -> None:
    run = world(RATES, inner={"total_steps": 10 * STEPS}, outer=outer)
    run.start()
    run.reach(ROUNDS)
    length = Layout.of(RunConfig.model_validate({"model": {"preset": "llama-tiny"}}).model).length
    size = codec(str(outer["codec"])).size(length)
    measured = predicted = 0.0
    for site in run.sites.values():
        events = site.events()
        together = next(number for number, event in enumerate(events) if len(event["members"]) > 1)
        first, *later = events[together:]  # after a start on its own
        measured += later[-1]["bytes_sent"] - first["bytes_sent"]
        predicted += sum(size * sent(outer["algorithm"], len(event["members"])) for event in later)
        assert later[-1]["loss"] < 0.8 * math.log(256), "of bytes at random"
    assert measured == pytest.approx(predicted, rel=0.03)


def sent(algorithm: object, members: int) -> float:
    """How many vectors a member sends in a round, in the mean over all: its part to the owners and its own to all; or
    all that it has to its partner."""
    return 2 * (members - 1) / members if algorithm == "pier" else members - 1
