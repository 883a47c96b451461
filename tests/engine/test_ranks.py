"""What the daemon sees of a program's ranks: who has died, who is stopped, who is behind, and where they are."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pier_node.engine.ranks import RankTable

RANK = """
import sys, time
from pier_node.engine.ranks import STEPS, enter
row = enter(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
row[STEPS] = int(sys.argv[4])
def waits_for_data():
    print("here", flush=True)
    time.sleep(600)
waits_for_data()
"""


class Ranks:
    """A table, and the processes in it."""

    def __init__(self, *steps: int) -> None:
        self.table = RankTable(len(steps))
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, self.table.path, str(len(steps)), str(rank), str(done)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, done in enumerate(steps)
        ]
        for process in self.processes:
            assert process.stdout
            assert process.stdout.readline() == "here\n"


@pytest.fixture
def ranks() -> Iterator[list[Ranks]]:
    made: list[Ranks] = []
    yield made
    for each in made:
        for process in each.processes:
            process.kill()
            process.communicate()


def test_a_rank_that_is_behind_is_named(ranks: list[Ranks]) -> None:
    ranks.append(group := Ranks(17, 16))
    assert re.fullmatch(r"rank 1 \(process \d+\) has done 16 of 17 steps", group.table.suspects())
    assert group.table.dead() == []


def test_a_stopped_rank_is_named_before_one_that_is_behind_and_a_dead_one_too(ranks: list[Ranks]) -> None:
    ranks.append(group := Ranks(3, 4, 4))
    group.processes[1].send_signal(signal.SIGSTOP)
    os.waitpid(group.processes[1].pid, os.WUNTRACED)  # a signal takes effect when its process is next scheduled
    group.processes[2].kill()
    group.processes[2].wait()
    dead = group.table.dead()
    assert len(dead) == 1
    assert re.fullmatch(r"rank 2 \(process \d+\) has died", dead[0])
    assert re.fullmatch(r"rank 2 \(process \d+\) has died, rank 1 \(process \d+\) is stopped", group.table.suspects())


def test_of_equals_the_step_is_told_and_each_prints_where_it_is(ranks: list[Ranks]) -> None:
    ranks.append(group := Ranks(5, 5))
    assert group.table.suspects() == "it is in its step 6, with all 2 ranks"
    group.table.dump()
    for process in group.processes:
        assert process.stderr
        assert "waits_for_data" in "".join(process.stderr.readline() for _ in range(3))


def test_ranks_of_other_machines_cannot_be_seen() -> None:
    table = RankTable(2)
    assert table.dead() == []
    assert table.suspects() == "it is in its step 1"
