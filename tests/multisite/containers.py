"""Places that are containers, of the same shape as in docker/compose.yaml.

A place has two containers. The one of its link holds its network, and the right to change it; it lives on when the
site dies. The other one is the site: a new one for each start, on the same network and the same folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from multisite.places import LinkedPlace
from processes.hosts import sh
from processes.site import wait_until

IMAGE = "pier"
BUILD = Path(__file__).parents[2] / "scripts" / "images"
BUILDING = 900.0
"""Seconds that the image may take where nothing of it is there yet."""
NO_DOCKER = "no Docker engine answers here (Debian: docker.io): sites in containers are NOT tested"
ADDRESS = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"


class Container(LinkedPlace):
    """A place of two containers.

    Args:
        name: of the site.
        network: of Docker's that it is on; also its label.
        folder: of this machine, seen at the same path there.
    """

    def __init__(self, name: str, network: str, folder: Path) -> None:
        self._site, self._label, self._folder = f"{network}-{name}", f"--label {network}", folder
        link = f"{self._site}-link"
        sh(
            f"docker run --detach --init --name {link} {self._label} --network {network} --user 0 --cap-add NET_ADMIN "
            f"--no-healthcheck --entrypoint sleep {IMAGE} infinity"
        )
        super().__init__(name, sh(f"docker inspect --format '{ADDRESS}' {link}").strip(), f"docker exec {link}")

    def command(self, program: str, *words: str) -> list[str]:
        # The first process of a container could not kill itself, as sites under test do: that one is Docker's init.
        box = f"docker run --rm --init --name {self._site} {self._label} --network container:{self._site}-link"
        mine = f"--user {os.getuid()}:{os.getgid()} --volume {self._folder}:{self._folder} --workdir {self._folder}"
        like = f"--env OMP_NUM_THREADS=1 --env COLUMNS=200 --no-healthcheck --entrypoint {program} {IMAGE}"
        return [*box.split(), *mine.split(), *like.split(), *words]

    def aside(self, program: str, *words: str) -> list[str]:
        return ["docker", "exec", self._site, program, *words]

    def pid(self, process: subprocess.Popen[bytes]) -> int:
        def begun() -> bool:
            return self._pid() > 0 or process.poll() is not None

        wait_until(f"{self._site} begins", begun)
        return self._pid() or process.pid

    def _pid(self) -> int:
        words = ["docker", "inspect", "--format", "{{.State.Pid}}", self._site]
        init = int(subprocess.run(words, capture_output=True, text=True, timeout=120).stdout.strip() or 0)
        with suppress(psutil.NoSuchProcess):
            return next((child.pid for child in psutil.Process(init).children()), 0) if init else 0
        return 0


@contextmanager
def containers(folder: Path, names: Sequence[str]) -> Iterator[Sequence[LinkedPlace]]:
    """Containers on a network of Docker's; nothing of them is left afterwards."""
    network = f"pier-{os.getpid()}"
    sh(f"docker network create {network}")
    try:
        yield [Container(name, network, folder) for name in names]
    finally:
        wait_until("the containers are gone", lambda: not _removed(network))
        sh(f"docker network rm {network}")


def _removed(label: str) -> list[str]:
    """Remove those with a label; which there were. Docker refuses those that are being removed because they ended."""
    left = sh(f"docker ps --all --quiet --filter label={label}").split()
    if left:
        subprocess.run(["docker", "rm", "--force", "--volumes", *left], capture_output=True, timeout=120)
    return left


def docker_answers() -> bool:
    """Whether containers can be run here."""
    return bool(shutil.which("docker")) and not subprocess.run(["docker", "info"], capture_output=True).returncode


def build_image() -> None:
    """Build the image of this working tree; what has not changed since the last time is not built again."""
    done = subprocess.run([str(BUILD)], capture_output=True, text=True, timeout=BUILDING)
    assert done.returncode == 0, f"{BUILD}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
