from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from pier_node.base.errors import PierError
from pier_node.trainer.data.corpus import Batch
from pier_node.trainer.data.prefetch import Prefetch

CPU = torch.device("cpu")


def batch(step: int, sequences: int) -> Batch:
    rows = np.arange(sequences * 5, dtype=np.int64).reshape(sequences, 5) + 1000 * step
    return rows[:, :-1], rows[:, 1:]


def test_each_step_gets_its_own_rows_whichever_came_before() -> None:
    batches = Prefetch(batch, CPU)
    for step, sequences in ((0, 2), (1, 2), (2, 3), (3, 3), (9, 3), (4, 3), (4, 3)):
        for found, expected in zip(batches.rows(step, sequences), batch(step, sequences), strict=True):
            assert found.tolist() == expected.tolist()


def test_the_next_rows_are_made_while_a_step_runs() -> None:
    made = dict[int, threading.Event]({step: threading.Event() for step in range(9)})
    asked: list[int] = []

    def make(step: int, sequences: int) -> Batch:
        asked.append(step)
        made[step].set()
        return batch(step, sequences)

    batches = Prefetch(make, CPU)
    batches.rows(4, 2)
    assert made[5].wait(60)
    batches.rows(5, 2)
    assert made[6].wait(60)
    assert asked == [4, 5, 6], "none twice"


def test_an_error_comes_with_its_step() -> None:
    def make(step: int, sequences: int) -> Batch:
        if step == 5:
            raise PierError("no such rows")
        return batch(step, sequences)

    batches = Prefetch(make, CPU)
    batches.rows(4, 2)
    with pytest.raises(PierError, match="no such rows"):
        batches.rows(5, 2)
    batches.rows(6, 2)


def test_a_process_ends_with_rows_that_nobody_took() -> None:
    code = (
        "from trainer.data.test_prefetch import CPU, batch; from pier_node.trainer.data.prefetch import Prefetch;"
        "Prefetch(batch, CPU).rows(0, 2)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=env)
