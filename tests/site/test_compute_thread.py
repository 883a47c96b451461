"""The thread that computes, and a process that ends although it hangs."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from pier_node.site import pipeline
from pier_node.site.pipeline import ComputeThread


def test_one_thing_is_done_after_the_other_in_one_thread() -> None:
    thread, done = ComputeThread(), list[int]()

    def work(number: int) -> int:
        done.append(number)
        return threading.get_ident()

    results = [thread.submit(work, number) for number in range(5)]
    assert len({result.result(60.0) for result in results}) == 1
    assert done == [*range(5)]
    thread.shutdown()


def test_what_goes_wrong_is_told_and_the_next_is_done() -> None:
    thread = ComputeThread()
    wrong, right = thread.submit(lambda: 1 / 0), thread.submit(lambda: 7)
    with pytest.raises(ZeroDivisionError):
        wrong.result(60.0)
    assert right.result(60.0) == 7
    thread.shutdown()


def test_what_was_not_begun_is_cancelled_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "PATIENCE", 0.01)
    thread, begun, over = ComputeThread(), threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        return over.wait(60.0)

    hangs = thread.submit(hang)
    assert begun.wait(60.0)
    later = thread.submit(lambda: 1)
    thread.shutdown(cancel_futures=True)
    with pytest.raises(CancelledError):
        later.result(60.0)
    assert not hangs.done(), "nobody waited for it"
    over.set()
    assert hangs.result(60.0) is True


HANGS = """
import threading
from pier_node.site.pipeline import ComputeThread
begun = threading.Event()
ComputeThread().submit(lambda: (begun.set(), threading.Event().wait()))
assert begun.wait(60.0)
"""


def test_a_process_ends_although_it_hangs() -> None:
    assert subprocess.run([sys.executable, "-c", HANGS], timeout=120.0, check=False).returncode == 0
