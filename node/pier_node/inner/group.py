"""The processes of a site's workers, seen from its daemon: their launcher, and a socket to every worker."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from pier_node.errors import PierError
from pier_node.inner.messages import LINE_LIMIT, Failed, Hello, Message, decode, encode
from pier_node.sockets import SocketFolder

LEAVE_SECONDS = 3.0
"""What workers get to leave by themselves, and then the launcher after SIGTERM."""


@dataclass(frozen=True)
class Team:
    """Event: every worker has connected. After a restart there is a new team, and the old one hears nothing more."""

    hello: Hello
    """What one of them said."""
    writers: tuple[asyncio.StreamWriter, ...]

    def send(self, message: Message) -> None:
        """Tell every worker."""
        line = encode(message)
        for writer in self.writers:
            writer.write(line)


@dataclass(frozen=True)
class Ended:
    """Event: the launcher has ended, and with it all workers."""

    code: int


@dataclass(eq=False)
class _Conversation:
    """A connection, and the attempt that its worker belongs to; -1: it has not said so yet."""

    task: asyncio.Task[None]
    writer: asyncio.StreamWriter
    attempt: int = -1


class Group:
    """A launcher and the workers that it keeps alive.

    Args:
        log: a file that takes what launcher and workers print.

    Attributes:
        events: what happens, in order: a Team before anything that its workers say.
        home: the folder of the socket, for this user alone; it goes with the group.
    """

    def __init__(self, log: Path) -> None:
        self.events: asyncio.Queue[Team | Message | Ended] = asyncio.Queue()
        self._folder = SocketFolder("workers")
        self.home = self._folder.path
        self._log = log
        self._stopping = False
        self._attempt = -1
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._conversations: set[_Conversation] = set()
        self._server: asyncio.Server | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self, workers: int, max_restarts: int) -> None:
        """Listen, and start the launcher; 0 workers: one for each device."""
        socket = self.home / "socket"
        self._server = await asyncio.start_unix_server(self._accept, path=socket, limit=LINE_LIMIT)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *launcher(socket, workers, max_restarts),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl+C in the daemon's terminal is not for them
            )
        self._watch = asyncio.create_task(self._report_end(self._process))

    async def stop(self) -> None:
        """End everything, within seconds: by closing the sockets, then by SIGTERM, then by SIGKILL."""
        self._stopping = True
        if self._watch is not None:
            self._watch.cancel()
        for conversation in self._conversations:
            conversation.writer.close()
        if self._process is not None:
            await _end(self._process)
        await _heard_out(self._conversations)
        if self._server is not None:
            self._server.close()  # last: until now it turned away workers that were late
        self._folder.remove()

    async def _report_end(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        await _heard_out(self._conversations)
        self.events.put_nowait(Ended(code))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        conversation = _Conversation(task, writer)
        self._conversations.add(conversation)
        if self._stopping:
            writer.close()
        try:
            await self._converse(conversation, reader)
        except (PierError, ValueError) as error:  # ValueError: a line longer than LINE_LIMIT
            self.events.put_nowait(Failed(f"a worker broke the protocol: {error}", ""))
        except ConnectionResetError:
            pass  # it died with something unread: the launcher sees to it
        finally:
            self._conversations.discard(conversation)
            writer.close()

    async def _converse(self, conversation: _Conversation, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            match decode(line):
                case Hello() as hello:
                    await self._enrol(hello, conversation)
                case message:
                    self.events.put_nowait(message)

    async def _enrol(self, hello: Hello, conversation: _Conversation) -> None:
        conversation.attempt = hello.attempt
        # The launcher ends a whole attempt before it starts the next: what the last one said comes first.
        await _heard_out({other for other in self._conversations if -1 < other.attempt < hello.attempt})
        if hello.attempt > self._attempt:
            self._attempt, self._writers = hello.attempt, {}
        self._writers[hello.rank] = conversation.writer
        if len(self._writers) == hello.world:
            self.events.put_nowait(Team(hello, tuple(self._writers.values())))


async def _heard_out(conversations: set[_Conversation]) -> None:
    if conversations:
        await asyncio.wait([conversation.task for conversation in conversations], timeout=LEAVE_SECONDS)


def launcher(socket: Path, workers: int, max_restarts: int) -> list[str]:
    """The command that starts the launcher."""
    options = ["--socket", str(socket), "--workers", str(workers), "--max-restarts", str(max_restarts)]
    return [sys.executable, "-m", "pier_node.inner.launch", *options]


async def _end(process: asyncio.subprocess.Process) -> None:
    family = _family(process.pid) if process.returncode is None else []
    if not await _ended(process):
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await _ended(process)
    for relative in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            relative.kill()
    await process.wait()


async def _ended(process: asyncio.subprocess.Process) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), LEAVE_SECONDS)
    return process.returncode is not None


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []
