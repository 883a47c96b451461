"""Where a program under test runs. This one is this machine as it is; hosts.py and tests/multisite have others."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

from bench.ports import free_port


class Place:
    """This machine. Its files are seen at the same paths from every place."""

    address = "127.0.0.1"

    def port(self, usual: int) -> int:
        """Where a program can listen; here others may have its usual port."""
        return free_port()

    def command(self, program: str, *words: str) -> list[str]:
        """What runs one of Pier's programs there, in the foreground."""
        return [str(Path(sys.executable).with_name(program)), *words]

    def aside(self, program: str, *words: str) -> list[str]:
        """What runs one there beside the one that `command` runs."""
        return self.command(program, *words)

    def pid(self, process: subprocess.Popen[bytes]) -> int:
        """The process id, as this machine sees it, of the program that runs by `command`."""
        return process.pid

    def get(self, url: str) -> bytes:
        """What is at a URL of that place. Raises OSError."""
        with urllib.request.urlopen(url, timeout=30.0) as answer:
            return bytes(answer.read())


HERE = Place()
