"""What a site computes, and when it says that it hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from rounds.cases import CALM
from simulation.network import Network
from simulation.virtual_time import Hanging, run

from pier_node.pipeline.activation_codec import Formats, TensorFormat
from pier_node.pipeline.context import Tools
from pier_node.rounds.progress import Progress
from pier_node.rounds.roster import Roster
from pier_node.rounds.suspects import Suspicion
from pier_proto.v1.peer_pb2 import Phase, Pulse, Site

Story = Callable[[Tools, Hanging], Coroutine[Any, Any, None]]

FORMATS = Formats(TensorFormat("none", (1, 1, 1)), TensorFormat("none", (1, 1, 1)))


def told(story: Story) -> None:
    """Run it with the tools of a site, whose thread does what the story says."""

    async def main() -> None:
        carrier, thread = Network(1, CALM).join("a"), Hanging()
        roster = Roster(carrier, lambda: Pulse(site=Site(node="a")))
        tools = Tools(carrier, roster, thread, lambda _step, _place: pytest.fail("nobody asks"), 1, FORMATS)
        await story(tools, thread)
        await roster.stop()

    run(main())


def test_a_task_may_take_several_times_the_longest_of_the_last_ones() -> None:
    async def story(tools: Tools, thread: Hanging) -> None:
        assert await tools.compute(lambda: 7) == 7
        thread.delays = [90.0] + [10.0] * 30 + [59.0, 353.0, 2125.0]
        for number in range(33):
            assert await tools.compute(lambda number=number: number) == number  # type: ignore[misc]
        with pytest.raises(Suspicion, match="a: has computed for 2118 s without an end"):
            await tools.compute(lambda: 1)
        assert tools.stuck

    told(story)


def test_nothing_is_computed_behind_what_does_not_end() -> None:
    async def story(tools: Tools, thread: Hanging) -> None:
        thread.delays, done, progress = [300.0], list[int](), Progress()
        with pytest.raises(Suspicion, match="for 100 s"):
            await tools.compute(lambda: done.append(1))
        with pytest.raises(Suspicion, match="a: still computes"):
            await tools.compute(lambda: done.append(2))
        assert done == []
        await tools.freed(progress)
        assert asyncio.get_running_loop().time() == pytest.approx(300.0)
        assert (progress.phase, done, tools.stuck) == (Phase.PHASE_PAUSED, [1], False)
        await tools.compute(lambda: done.append(3))
        assert done == [1, 3]
        thread.delays = [150.0]
        await tools.compute(lambda: done.append(4))  # who was slow once is given more time

    told(story)


def test_who_comes_behind_what_others_gave_up_says_that_it_hangs() -> None:
    async def story(tools: Tools, thread: Hanging) -> None:
        thread.delays, done = [300.0], list[int]()
        first, second = (asyncio.create_task(tools.compute(lambda it=it: done.append(it))) for it in (1, 2))  # type: ignore[misc]
        await asyncio.sleep(10.0)
        first.cancel()
        second.cancel()  # another site has given up the attempt
        await asyncio.wait([first, second])
        with pytest.raises(Suspicion, match="a: has computed for 100 s"):
            await tools.compute(lambda: done.append(3))
        await tools.freed(Progress())
        assert done == [3], "nobody wants the rest any more"

    told(story)


def test_only_the_first_stage_opens_the_data() -> None:
    async def story(tools: Tools, _thread: Hanging) -> None:
        opened: list[int] = []
        for stage in (1, 0):
            tools.open_data = lambda stage=stage: opened.append(stage)  # type: ignore[misc]
            await tools.prepare(stage)
        assert opened == [0]

    told(story)


def test_what_goes_wrong_is_raised_to_who_asked() -> None:
    async def story(tools: Tools, _thread: Hanging) -> None:
        with pytest.raises(ZeroDivisionError):
            await tools.compute(lambda: 1 // 0)
        assert not tools.stuck

    told(story)
