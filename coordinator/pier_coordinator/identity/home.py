"""The run's folder at the coordinator: its identity, its secrets, its state, and the authority that follows from them.

run.toml         the run's configuration; it must not change once the run has begun
node.key         the coordinator's identity
run.token        the run's secret, from which the key of its certificate authority is derived: keep it private
operator.token   the token that actions on the page and the command line need
coordinator.db   sites, invites, orders and all facts; events.jsonl beside it holds the facts, one per line
experts.json     the plan of experts that was accepted last
witness.json     to whom the coordinator gave its last vote as the run's witness: without it, a run can fork
checkpoints/     of experts in training (experts/checkpoints.py)
daemon.json      while a coordinator runs: its process id, its address and the URL of its page
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from cryptography.hazmat.primitives.asymmetric import ec

from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig, load
from pier_node.identity.certificates import Credentials, authority_key, credentials, issue
from pier_node.identity.node import Identity, Signer, Token, node_id, write_private
from pier_node.rounds import revocations
from pier_node.rounds.statements import SignedStatements
from pier_node.rounds.witness import WITNESS_FILE, Witness
from pier_proto.v1.peer_pb2 import Revocations

RUN_FILE, DATABASE, DAEMON_FILE = "run.toml", "coordinator.db", "daemon.json"
OPERATOR_FILE, VIEWER_FILE = "operator.token", "viewer.token"
PLAN_FILE = "experts.json"
SCORES = "scores"
"""Folder of the score sheets that sites sent, with one folder per evaluation."""


@dataclass(frozen=True)
class Authority:
    """A run's certificate authority: it certifies sites and signs the list of revoked sites.

    Attributes:
        token: the run's secret.
        run_hash: the hash of the run's configuration.
    """

    token: Token
    run_hash: bytes

    def certify(self, key: ec.EllipticCurvePublicKey) -> bytes:
        """Issue a certificate (PEM) for a site's public key."""
        return issue(self.token, node_id(key), key)

    def revocations(self, version: int, nodes: Collection[str]) -> Revocations:
        """Sign the list of revoked sites."""
        return revocations.signed(authority_key(self.token), self.run_hash, version, nodes)


@dataclass(frozen=True)
class Home:
    """A run's folder: one that holds a run.toml."""

    folder: Path

    @classmethod
    def found(cls, folder: Path) -> Self:
        """Open a run's folder. Raises PierError if it has no run.toml."""
        if not (folder / RUN_FILE).exists():
            raise PierError(
                f"{folder} has no {RUN_FILE}",
                "`pier-coordinator init FOLDER` makes a run; --data FOLDER names the one that is meant.",
            )
        return cls(folder)

    @cached_property
    def config(self) -> RunConfig:
        """The run's configuration. Raises PierError."""
        return load(self.folder / RUN_FILE)

    @cached_property
    def identity(self) -> Identity:
        """The coordinator's identity; created at the first use. Raises PierError."""
        return Identity.load_or_create(self.folder)

    @cached_property
    def token(self) -> Token:
        """The run's secret; created at the first use. Raises PierError if run.toml has changed since."""
        token = Token.load(self.folder)
        if token is None:
            token = Token.new(self.config.hash())
            token.save(self.folder)
        if not token.is_for(self.config.hash()):
            raise PierError(
                f"{self.folder / RUN_FILE} has changed since the run began",
                "Put it back as it was, a configuration never changes; or `pier-coordinator init` another run.",
            )
        return token

    @cached_property
    def operator(self) -> str:
        """The operator's token, which actions need; created at the first use."""
        return self._secret(OPERATOR_FILE)

    @cached_property
    def viewer(self) -> str:
        """The viewer's token, which a private page needs; created at the first use."""
        return self._secret(VIEWER_FILE)

    def _secret(self, name: str) -> str:
        path = self.folder / name
        if not path.exists():
            write_private(path, f"{secrets.token_urlsafe(24)}\n".encode())
        return path.read_text().strip()

    @property
    def database(self) -> Path:
        """Path of the database."""
        return self.folder / DATABASE

    def credentials(self) -> Credentials:
        """The credentials with which the coordinator proves its identity to sites."""
        return credentials(self.identity, self.token)

    @cached_property
    def authority(self) -> Authority:
        """The run's certificate authority. Raises PierError."""
        return Authority(self.token, self.config.hash())

    def witness(self, asked: bool) -> Witness:
        """The run's witness, which has the coordinator's node id. Raises PierError.

        Args:
            asked: whether it was asked before.
        """
        identity = self.identity
        statements = SignedStatements(Signer(identity, self.config.hash()), identity.node)
        return Witness(self.folder / WITNESS_FILE, identity.node, statements, asked)

    def announce(self, address: str, page: str) -> None:
        """Let commands on this machine find the coordinator; `page` is the URL of its page. Raises PierError."""
        fields, path = {"pid": os.getpid(), "address": address, "http": page}, self.folder / DAEMON_FILE
        try:
            durable.replace(path, json.dumps(fields).encode())
        except OSError as error:
            raise PierError(f"{path}: {error.strerror}", "Make room on its disk, and start again.") from error

    def leave(self) -> None:
        """Record that the coordinator has stopped."""
        (self.folder / DAEMON_FILE).unlink(missing_ok=True)
