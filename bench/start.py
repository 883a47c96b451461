"""How long the three commands of the README take: from two fresh containers to the first round of two sites.

    scripts/images && python -m bench.start

Each container has the image `pier` and nothing else; they share a network of their own, and all of it is removed
afterwards. What is printed is JSON: seconds since both were started, for each step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable

LOOK = 1.0
"""Seconds between two looks at a log, each of which starts a process in the container."""


class Machine:
    """A container that waits for commands."""

    def __init__(self, image: str, network: str, name: str) -> None:
        self.name = f"{network}-{name}"
        docker("run", "-d", "--name", self.name, "--network", network, "--entrypoint", "sleep", image, "infinity")

    def run(self, command: str, *options: str) -> str:
        """Run a shell command; return what it prints. Raises CalledProcessError."""
        return docker("exec", *options, self.name, "sh", "-c", command)

    def start(self, command: str, **environment: str) -> None:
        """Run a shell command in the background; `log` has what it prints."""
        given = [word for name, value in environment.items() for word in ("-e", f"{name}={value}")]
        self.run(f"{command} >log 2>&1", "-d", *given)

    def log(self) -> str:
        """What the command in the background has printed."""
        return self.run("cat log 2>/dev/null || true")


def docker(*words: str) -> str:
    """Call docker; return what it prints. Raises CalledProcessError."""
    return subprocess.run(["docker", *words], check=True, capture_output=True, text=True).stdout.strip()


def until(seen: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait. Raises TimeoutError."""
    give_up = time.monotonic() + seconds
    while not seen():
        if time.monotonic() > give_up:
            raise TimeoutError(f"after {seconds:g} s: {what} has not come")
        time.sleep(LOOK)


def walk(image: str, network: str, patience: float) -> dict[str, float]:
    """The three commands. Returns the seconds since the containers were there, by step."""
    first, second = Machine(image, network, "first"), Machine(image, network, "second")
    began, taken = time.monotonic(), dict[str, float]()

    def done(step: str) -> None:
        taken[step] = round(time.monotonic() - began, 1)

    first.run("pier-node init --sites 2")
    done("init")
    first.start("pier-node start")
    until(lambda: "--peers" in first.log(), patience, "the command for the other site")
    done("invitation")
    address = first.log().split("--peers ")[1].split()[0]
    second.start(f"pier-node start --peers {address}", PIER_TOKEN=first.run("cat pier-data/run.token"))
    until(lambda: "committed by 2" in first.log(), patience, "a round of two")
    done("first round of two")
    return taken


def main() -> None:
    """Set up, walk, and remove everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default="pier")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for each step [default: 300]")
    given = parser.parse_args()
    network = f"pier-start-{os.getpid()}"
    docker("network", "create", network)
    try:
        print(json.dumps(walk(given.image, network, given.patience)))
    finally:
        subprocess.run(
            ["docker", "rm", "-f", f"{network}-first", f"{network}-second"], capture_output=True, check=False
        )
        docker("network", "rm", network)


if __name__ == "__main__":
    main()
