"""What the doctor knows at the start: this site's options and data folder, read without changing them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from cryptography.hazmat.primitives.asymmetric import ec

from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig
from pier_node.identity.certificates import Credentials, credentials
from pier_node.identity.node import Identity, Token
from pier_node.site.coordinator.enrolment import Enrolment
from pier_node.site.join import find_site, find_token, known_config
from pier_node.site.running import Running, Status, find_daemon, last_event
from pier_node.site.settings import Settings
from pier_node.wire.transport import Transport


@dataclass(frozen=True)
class Standpoint:
    """This site.

    Attributes:
        config: the run; None: only the peers know it.
        credentials: None with --insecure, or if this site will found a run.
        daemon: None: none runs.
        status: the daemon's status, or else that of its last round, or else {}.
        addresses: known addresses of other sites, with their names, which may be empty.
    """

    settings: Settings
    config: RunConfig | None
    identity: Identity
    token: Token | None
    credentials: Credentials | None
    daemon: Running | None
    status: Status
    addresses: dict[str, str]
    transport: Transport

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Read the data folder and the options. Raises PierError: they contradict each other or are incomplete."""
        enrolment = Enrolment.load(settings.folder)
        token = None if enrolment else find_token(settings)  # an enrolled site came with an invite
        config, (transport, record) = known_config(settings), find_site(settings)
        # Before its first start a site has no key; one created here is not kept.
        identity = (
            Identity.load_or_create(settings.folder) if record else Identity(ec.generate_private_key(ec.SECP256R1()))
        )
        daemon = find_daemon(settings.folder)
        status = daemon.status() if daemon else last_event(settings.folder)
        addresses = dict.fromkeys(settings.peers, "")
        addresses |= {site.address: site.name for site in record.sites()} if record else {}
        addresses |= {peer["address"]: peer["name"] for peer in status.get("peers", [])}
        if addresses and token is None and enrolment is None and not settings.insecure:
            raise PierError(
                f"there is no token in {settings.folder}",
                "Give PIER_TOKEN, --token-file or --token, or --insecure if the run is.",
            )
        proof = credentials(identity, token) if token else None
        if enrolment and not settings.insecure:
            proof = enrolment.credentials(identity)
        here = cls(settings.after(record), None, identity, token, proof, daemon, status, addresses, transport)
        return here.in_run(config) if config else here

    def in_run(self, config: RunConfig) -> Self:
        """The same, once the run is known. Raises PierError: the token belongs to another run."""
        if self.token:
            self.token.require_run(config.hash())
        return replace(self, config=config)
