"""Places that are network namespaces of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from multisite.places import LinkedPlace
from processes.hosts import Host, network


class Namespace(LinkedPlace):
    """A network namespace; all else is this machine's."""

    def __init__(self, name: str, host: Host) -> None:
        super().__init__(name, host.address, f"ip netns exec {host.name}")
        self.host = host

    def command(self, program: str, *words: str) -> list[str]:
        return [*self._link.split(), *super().command(program, *words)]


@contextmanager
def namespaces(folder: Path, names: Sequence[str]) -> Iterator[Sequence[LinkedPlace]]:
    """Namespaces on one wire."""
    with network(len(names)) as hosts:
        yield [Namespace(name, host) for name, host in zip(names, hosts, strict=True)]
