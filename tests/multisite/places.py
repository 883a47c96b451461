"""Places with an address and an uplink of their own, whatever they are made of."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import urlsplit

from processes.hosts import bytes_sent, sh, shape
from processes.place import Place

NOWHERE = "02:00:00:00:00:00"
"""A hardware address that nobody has: what is sent there is lost without a word."""
GET = r"""exec 3<>"/dev/tcp/$0/$1" && printf 'GET %s HTTP/1.0\r\n\r\n' "$2" >&3 && cat <&3"""


class LinkedPlace(Place):
    """A place on a network.

    Args:
        name: of the site there.
        address: that others reach it at.
        link: the words before a command that looks at, or changes, its end of the network.
    """

    def __init__(self, name: str, address: str, link: str) -> None:
        self.name, self.address, self._link = name, address, link

    def port(self, usual: int) -> int:
        return usual

    def get(self, url: str) -> bytes:
        parts = urlsplit(url)
        words = [*self._link.split(), "bash", "-c", GET, str(parts.hostname), str(parts.port), parts.path]
        done = subprocess.run(words, capture_output=True, timeout=120)
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise OSError(f"{url}: {head.decode() or done.stderr.decode()}")
        return body

    # --- its uplink ----------------------------------------------------------------------------

    def shape(self, mbit: float) -> None:
        """Give its uplink a rate, from now on."""
        sh(f"{self._link} tc qdisc replace dev eth0 root {shape(mbit)}")

    def sent(self) -> int:
        """Bytes that left by its uplink since it was shaped first, as the kernel counts them."""
        return bytes_sent(f"{self._link} tc")

    def lose(self, addresses: Iterable[str]) -> None:
        """Whatever it sends to these addresses is lost from now on."""
        self._neighbours(f"replace {address} lladdr {NOWHERE} nud permanent" for address in addresses)

    def find(self, addresses: Iterable[str]) -> None:
        """Whatever it sends to these addresses, which it lost, arrives again."""
        self._neighbours(f"del {address}" for address in addresses)

    def _neighbours(self, changes: Iterable[str]) -> None:
        commands = " && ".join(f"ip neigh {change} dev eth0" for change in changes)
        sh(f"{self._link} sh -c '{commands}'")


Network = Callable[[Path, Sequence[str]], AbstractContextManager[Sequence[LinkedPlace]]]
"""A folder that all places see, their names -> the places, for as long as it is entered."""
