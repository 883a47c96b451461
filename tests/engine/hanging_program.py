"""A program that hangs after some steps, once; and then does them all. $HANG_ONCE: the file that remembers.

With $LEAVE_CHILD it is killed instead, and a child that it has forked, such as a loader of data, lives on for a while.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

from pier_node.engine.messages import VERSION, Attach, Attached, Done, Progress, Ready, Train, decode, encode
from pier_node.engine.ranks import enter
from pier_node.engine.training_process import ENGINE_VARIABLE


def main() -> None:
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(os.environ[ENGINE_VARIABLE])
    lines = stream.makefile("rb")
    stream.sendall(encode(Attach(VERSION, ["weight 2x3"], 8, "", 1, 2.0, [])))
    place = decode(lines.readline())
    assert isinstance(place, Attached)
    enter(place.table, 1, 0)
    stream.sendall(encode(Ready()))
    train = decode(lines.readline())
    assert isinstance(train, Train)
    for step in range(train.steps):
        stream.sendall(encode(Progress(step, 2.0, 8, 0.1)))
        time.sleep(0.02)
    hung = Path(os.environ["HANG_ONCE"])
    if not hung.exists():
        hung.write_text(str(os.getpid()))
        if "LEAVE_CHILD" in os.environ:
            if os.fork() == 0:
                Path(os.environ["LEAVE_CHILD"]).write_text(str(os.getpid()))
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGSTOP)
    stream.sendall(encode(Done(train.id, 1, 8, 0, 0.5, 0)))
    lines.readline()


if __name__ == "__main__":
    main()
