"""p2pd, the libp2p daemon that comes with hivemind: it starts and ends with this node, and restarts when it dies.

hivemind could start p2pd itself, but then p2pd can outlive this node, its sockets are open to every user of the
machine, and its death goes unnoticed. So this module starts p2pd and tells hivemind's P2P to use it.

The libp2p key of a site is an ECDSA key on P-256 in libp2p's format, in a file of the data folder. The peer id in a
site's multiaddrs is the hash of this key, so they stay the same as long as the key is kept.

The settings of p2pd are here, each with its reason; `p2pd --help` lists them all.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pier_node.base.errors import PierError
from pier_node.base.processes import SocketFolder
from pier_node.base.tasks import cancel_and_wait
from pier_node.identity.node import write_private

if TYPE_CHECKING:
    from hivemind.p2p import P2P


KEY_FILE = "p2p.key"


def make_key(path: Path) -> Path:
    """The key file at a path, created at the first start."""
    from hivemind.proto.crypto_pb2 import KeyType, PrivateKey

    if not path.exists():
        key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        write_private(path, PrivateKey(key_type=KeyType.ECDSA, data=key).SerializeToString())
    return path


START_SECONDS = 15.0
TRIES = 40
"""Most starts until one p2pd is sound."""
STOP_SECONDS = 1.0
PAUSES = (0.0, 0.5, 2.0, 10.0)
"""Seconds before a restart: after the first death, the second, ..."""
LASTING = 60.0
"""Seconds of running after which a p2pd that dies counts as having been healthy."""

_ALWAYS = [
    "-tls=1",
    "-noise=0",  # TLS only: half as fast again, since processors accelerate AES
    "-natPortMap=0",  # a site does not open ports of routers unasked
    "-autonat=0",
    "-relay=1",
    "-connManager=1",
    "-connLo=1536",  # more than there are sites, so that no connection is dropped
    "-connHi=2048",
    f"-persistentConnMaxMsgSize={1 << 18}",  # most bytes that the DHT may send in a message
]

ASKING = [*_ALWAYS, "-noListenAddrs=1", "-dhtClient=1"]
"""Settings of a node that only asks and that nobody asks anything."""


def listening(host: str, port: int) -> list[str]:
    """Settings of a node that others reach, and that relays for unreachable sites. Raises OSError: no such host."""
    return [
        *_ALWAYS,
        f"-hostAddrs={_multiaddr(host, port)}",
        "-dhtServer=1",
        "-forceReachabilityPublic=1",  # libp2p's test knows public addresses only; without this it relays little
        "-relayService=1",
        "-relayBufferSize=1048576",
        "-relayMaxCircuits=256",
        f"-relayDataLimit={1 << 44}",
        "-relayTimeLimit=8760h",
    ]


def _multiaddr(host: str, port: int) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = ipaddress.ip_address(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    return f"/ip{address.version}/{address}/tcp/{port}"


_ENVIRONMENT = {
    "GOLOG_LOG_LEVEL": "error",
    "LIBP2P_TCP_REUSEPORT": "false",  # a port in use is an error, not a second p2pd that takes half of the connections
}

log = logging.getLogger(__name__)


class P2pd:
    """One running p2pd, and those that replace it.

    Args:
        key: file of its libp2p key; None creates a key that lasts until `stop`.
        options: command-line options of p2pd.
        ready: called with the client of each p2pd that is up, before anything else gets it.
        sound: whether a p2pd works as configured; otherwise it is restarted, at most TRIES times.
    """

    def __init__(
        self,
        key: Path | None,
        options: list[str],
        ready: Callable[[P2P], Awaitable[None]],
        sound: Callable[[P2P], Awaitable[bool]] | None = None,
    ) -> None:
        self._options, self._ready, self._sound = options, ready, sound
        self._folder = SocketFolder(f"p2pd-{os.getpid()}")
        self._home = self._folder.path
        self._key = make_key(key or self._home / KEY_FILE)
        self._process: asyncio.subprocess.Process | None = None
        self._client: P2P | None = None
        self._up = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None

    async def start(self) -> P2P:
        """Start p2pd. Raises PierError."""
        client = await self._launch()
        self._keeping = asyncio.create_task(self._keep_up())
        return client

    async def client(self) -> P2P:
        """hivemind's client, as soon as p2pd is up."""
        await self._up.wait()
        return self._client

    async def stop(self) -> None:
        """End p2pd and remove its sockets."""
        if self._keeping is not None:
            await cancel_and_wait(self._keeping)
        await self._end()
        self._folder.remove()

    async def _launch(self) -> P2P:
        for _ in range(TRIES):
            client = await self._launch_once()
            if self._sound is None or await self._sound(client):
                break
            await self._end()
        else:
            log.warning("p2pd does not relay as it was told to: sites that have no open port may not reach each other")
            client = await self._launch_once()
        await self._ready(client)
        self._up.set()
        return client

    async def _launch_once(self) -> P2P:
        from hivemind.p2p import P2P
        from hivemind.utils.multiaddr import Multiaddr

        control = self._home / "socket"
        control.unlink(missing_ok=True)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pier_node.base.processes"),  # a fork here would upset gRPC's threads
            *(str(_program()), f"-listen=/unix{control}", f"-id={self._key}", "-idleTimeout=30s", *self._options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,  # Ctrl+C in our terminal must not reach it
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._spoken(self._process)
                here: type[P2P] = type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{self._home}/"})
                self._client = await here.replicate(Multiaddr(f"/unix{control}"))
        except TimeoutError as error:
            await self._end()
            raise PierError(f"p2pd did not come up within {START_SECONDS:.0f} s") from error
        return self._client

    async def _spoken(self, process: asyncio.subprocess.Process) -> None:
        """Return once p2pd says that it is up, and keep reading its output. Raises PierError."""
        assert process.stdout
        said = ""
        while line := (await process.stdout.readline()).decode(errors="replace").strip():
            if line.startswith("Peer ID:"):
                self._listener = asyncio.create_task(_overhear(process.stdout))
                return
            said = line
        await process.wait()
        raise PierError(f"p2pd does not start: {said}")

    async def _keep_up(self) -> None:
        deaths, loop = 0, asyncio.get_running_loop()
        while True:
            assert self._process
            began = loop.time()
            code = await self._process.wait()
            deaths = 0 if loop.time() - began > LASTING else deaths
            log.warning("p2pd ended (%d): starting it again", code)
            await self._end()
            await asyncio.sleep(PAUSES[min(deaths, len(PAUSES) - 1)])
            deaths += 1
            try:
                await self._launch()
            except Exception as error:  # hivemind's, too: it may have died again before it was asked
                log.warning("p2pd was not started again: %s", error or type(error).__name__)
                await self._end()

    async def _end(self) -> None:
        self._up.clear()
        client, self._client = self._client, None
        if client is not None:
            await client.shutdown()
        if self._process is not None and self._process.returncode is None:
            await _terminate(self._process)
        if client is not None:
            # Writes to a p2pd that has died fail; asyncio prints errors that nobody has fetched.
            control = client._client.control
            await asyncio.gather(control._read_task, control._write_task, return_exceptions=True)
        if self._listener is not None:
            await asyncio.wait({self._listener}, timeout=STOP_SECONDS)  # until asyncio, too, knows that it is gone


async def _terminate(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    except TimeoutError:
        with suppress(ProcessLookupError):  # on a busy machine it may have ended in time, unnoticed
            process.kill()
        await process.wait()


async def _overhear(output: asyncio.StreamReader) -> None:
    while line := await output.readline():
        log.debug("p2pd: %s", line.decode(errors="replace").rstrip())


def _program() -> Path:
    import hivemind.hivemind_cli as cli

    return Path(next(iter(cli.__path__))) / "p2pd"
