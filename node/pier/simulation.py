"""Several sites in one process tree of one machine, with real daemons and real rounds: to try things out."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from socket import create_server
from typing import Any, TypeVar

from pier_node.base.errors import PierError
from pier_node.engine.join import JOIN_VARIABLE

Result = TypeVar("Result")
FOUND_SECONDS = 300.0
"""How long the first site may take to found the run."""
LOOK = 0.1


@dataclass(frozen=True)
class _Site:
    process: SpawnProcess
    result: Connection
    log: Path

    def failed(self) -> PierError:
        problem = f"a site failed with exit code {self.process.exitcode}"
        if self.log.exists():
            return PierError(problem, f"{self.log} says why.")
        return PierError(
            f"{problem} before it called the function",
            "What it printed says why. The function has to be at the top level of a module that can be imported; in a "
            'script, what calls pier.simulate has to be below `if __name__ == "__main__":`.',
        )


def simulate(
    train: Callable[..., Result], *arguments: Any, sites: int = 2, folder: str | Path | None = None
) -> list[Result]:
    """Call `train(*arguments)` once for each of several sites, all on this machine, and return what the calls return.

    Each call runs in a process of its own and joins the run by `pier.join`, whose `config` founds it at the first site.
    `simulate` settles where the sites are, who their peers are and which token they use.

    Args:
        train: a function at the top level of a module, which calls pier.join; from a notebook, import it from a file. A
            script calls `simulate` below `if __name__ == "__main__":`, because each site imports it.
        sites: how many.
        folder: takes the sites' folders and logs; None: a new one among the system's temporary files.

    Raises:
        PierError: a site failed, which names its log; or `train` is in no file.
    """
    if train.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise PierError(
            f"sites are processes of their own, and cannot import {train.__qualname__} from a notebook",
            "Put it into a file beside the notebook (%%writefile sites.py), and import it from there.",
        )
    home = Path(folder or tempfile.mkdtemp(prefix="pier-simulation-"))
    home.mkdir(parents=True, exist_ok=True)
    addresses = _free_addresses(sites)
    token = home / "site-0" / "run.token"
    running: list[_Site] = []
    try:
        for number, address in enumerate(addresses):
            options = {"folder": str(home / f"site-{number}"), "listen": address, "sites": sites}
            if number:
                _wait_for(token, running[0])
                options |= {"peers": addresses[:1], "token_file": str(token)}
            running.append(_started(train, arguments, options, home / f"site-{number}.log"))
        return _results(running)
    finally:
        for site in running:
            site.process.terminate()
            site.process.join()


def _started(train: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any], log: Path) -> _Site:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(train, arguments, json.dumps(options), log, theirs))
    process.start()
    theirs.close()
    return _Site(process, ours, log)


def _run(train: Callable[..., Any], arguments: tuple[Any, ...], options: str, log: Path, result: Connection) -> None:
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ[JOIN_VARIABLE] = options
    result.send_bytes(pickle.dumps(train(*arguments)))  # `send` leaves tensors with this process, which ends


def _results(running: list[_Site]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(running):
        waiting = {site.result: number for number, site in enumerate(running) if number not in results}
        for ready in wait([*waiting]):
            assert isinstance(ready, Connection)
            number = waiting[ready]
            try:
                results[number] = pickle.loads(ready.recv_bytes())
            except EOFError:
                running[number].process.join()
                raise running[number].failed() from None
    for site in running:
        site.process.join()  # a daemon may have to serve others for a while
    return [results[number] for number in range(len(running))]


def _wait_for(token: Path, founder: _Site) -> None:
    deadline = time.monotonic() + FOUND_SECONDS
    while not token.exists():
        if not founder.process.is_alive() or time.monotonic() > deadline:
            raise founder.failed()
        time.sleep(LOOK)


def _free_addresses(count: int) -> list[str]:
    with ExitStack() as stack:
        servers = [stack.enter_context(create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
