"""A worker's end of the socket to its daemon. When the daemon is gone, so is the worker: at once, in mid-step too."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading

from pier_node.errors import PierError
from pier_node.inner.messages import LINE_LIMIT, Message, decode, encode


class Link:
    """A connection to the daemon. The process ends, with code 0, as soon as the daemon closes its end.

    Args:
        path: the daemon's Unix socket.
    """

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            _leave()
        self._received: queue.SimpleQueue[Message | PierError] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Message) -> None:
        """Tell the daemon."""
        try:
            self._socket.sendall(encode(message))
        except (BrokenPipeError, ConnectionResetError):
            _leave()

    def receive(self) -> Message:
        """The daemon's next message; waits for it as long as the daemon lives. Raises PierError: it is none."""
        received = self._received.get()
        if isinstance(received, PierError):
            raise received
        return received

    def _read(self) -> None:
        with contextlib.suppress(ConnectionResetError), self._socket.makefile("rb") as lines:
            while line := lines.readline(LINE_LIMIT):
                self._received.put(_decoded(line))
        _leave()


def _decoded(line: bytes) -> Message | PierError:
    try:
        return decode(line)
    except PierError as error:
        return error


def _leave() -> None:
    # The main thread may be inside a kernel or a collective for seconds: nothing short of this ends it now.
    os._exit(0)
