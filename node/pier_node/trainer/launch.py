"""Keeps a site's workers running, one process per device.

The daemon runs it as `python -m pier_node.trainer.launch`. It loads PyTorch once and forks the workers, which can then
start and restart without loading it. When one worker dies, all of them are restarted. The launcher ends when all
workers end normally, when they have died too often, or with its daemon.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from multiprocessing import connection, get_context
from multiprocessing.context import ForkProcess
from typing import Any

from pier_node.base.processes import call_process, die_with_parent, spin_little
from pier_node.trainer import devices
from pier_node.trainer.worker import Place, serve

WORKER = "pier-worker"
"""Name of a worker in `top` and `ps -o comm`."""

_FORK = get_context("fork")


def main() -> None:
    """Run the workers. Exit code 1: they died too often."""
    die_with_parent()
    arguments = _arguments()
    _set_environment()
    world = arguments.workers or _count()
    for attempt in range(arguments.max_restarts + 1):
        team = [_FORK.Process(target=_work, args=(arguments.socket, Place(i, world, attempt))) for i in range(world)]
        if _in_peace(team):
            return
    sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True, help="where the daemon listens")
    parser.add_argument("--workers", type=int, default=0, help="0: one for each device")
    parser.add_argument("--max-restarts", type=int, default=0)
    return parser.parse_args()


def _set_environment() -> None:
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    spin_little()


def _count() -> int:
    with _FORK.Pool(1) as pool:  # not here: a driver that is loaded before a fork does not work after it
        return pool.apply(devices.count)


def _work(socket: str, place: Place) -> None:
    die_with_parent()
    call_process(WORKER)
    serve(socket, place)


def _in_peace(team: Sequence[ForkProcess]) -> bool:
    """Run the workers until all have ended normally, or one has failed and all are killed.

    Returns whether all ended normally.
    """
    for worker in team:
        worker.start()
    running: dict[Any, ForkProcess] = {worker.sentinel: worker for worker in team}
    while running:
        for sentinel in connection.wait([*running]):
            worker = running.pop(sentinel)
            worker.join()
            if worker.exitcode != 0:
                _tell(f"worker {team.index(worker)} {_end_of(worker.exitcode)}")
                _end(team)
                return False
    return True


def _end_of(code: int | None) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"failed with exit code {code}"


def _tell(what: str) -> None:
    print(datetime.now(UTC).isoformat(timespec="seconds"), what, file=sys.stderr, flush=True)


def _end(team: Sequence[ForkProcess]) -> None:
    for worker in team:
        worker.kill()
    for worker in team:
        worker.join()


if __name__ == "__main__":
    main()
