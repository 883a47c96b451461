"""A site of a run as the doctor meets it: it says hello and answers probes, over real sockets."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from bench.ports import free_port
from pier_node.config.run import RunConfig
from pier_node.identity.certificates import credentials
from pier_node.identity.node import Identity, Token
from pier_node.site.settings import Settings
from pier_node.wire.carrier import HELLO, PROTOCOL, BadMessage
from pier_node.wire.grpc.carrier import GrpcCarrier
from pier_node.wire.probe import ProbeServer
from pier_proto.v1.peer_pb2 import HelloReply, HelloRequest, Site

CONFIG = RunConfig.model_validate({"run": {"name": "lake", "sites": 2}, "model": {"preset": "llama-tiny"}})
TOKEN = Token(bytes(range(32)), CONFIG.hash()[:16])


@dataclass
class Peer:
    """A site that runs.

    Attributes:
        names: other sites that it knows.
        clock: its clock.
    """

    name: str
    config: RunConfig = CONFIG
    token: Token | None = TOKEN
    names: Sequence[Site] = ()
    clock: Callable[[], float] = time.time
    site: Site = field(default_factory=Site)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[str]:
        """Its address."""
        identity = Identity(ec.generate_private_key(ec.SECP256R1()))
        proof = credentials(identity, self.token) if self.token else None
        carrier = GrpcCarrier(identity.node, self.config.hash(), proof)
        carrier.serve(HELLO, self._hello)
        ProbeServer(carrier, self.config.hash(), clock=self.clock)
        port = await carrier.start("127.0.0.1", 0)
        self.site = Site(node=identity.node, name=self.name, address=f"127.0.0.1:{port}")
        try:
            yield self.site.address
        finally:
            await carrier.stop()

    async def _hello(self, _sender: str, request: HelloRequest) -> HelloReply:
        if request.run_hash not in (b"", self.config.hash()):
            raise BadMessage(f"this is run {self.config.hash().hex()[:8]}")
        return HelloReply(
            protocol=PROTOCOL,
            run_hash=self.config.hash(),
            run_config=self.config.canonical(),
            site=self.site,
            roster=[self.site, *self.names],
        )


@pytest.fixture
def new_site(tmp_path: Path) -> Callable[..., Settings]:
    """The options of a site that has never been started."""

    def options(*peers: str, **more: object) -> Settings:
        plain: dict[str, object] = {
            "folder": tmp_path / "new",
            "peers": peers,
            "token": str(TOKEN),
            "listen": f"127.0.0.1:{free_port()}",
        }
        return Settings(**{**plain, **more})  # type: ignore[arg-type]

    return options
