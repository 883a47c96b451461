"""The folder of a run at its coordinator: who it is, what it may do, and what it remembers.

run.toml         what the run trains; never changed once it has begun
node.key         the coordinator's identity
run.token        the run's secret, from which its certificate authority follows: keep it to yourself
operator.token   what actions on the page and the command line need
coordinator.db   sites, invites, orders, and every fact; events.jsonl beside it has the facts, line by line
experts.json     the plan of experts that was accepted last
checkpoints/     of experts that are being trained (experts/checkpoints.py)
daemon.json      while a coordinator runs: its process and its page
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from pier_coordinator.identity.authority import Authority
from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig, load
from pier_node.identity.certificates import Credentials, credentials
from pier_node.identity.node import Identity, Token, write_private

RUN_FILE, DATABASE, OPERATOR_FILE, DAEMON_FILE = "run.toml", "coordinator.db", "operator.token", "daemon.json"
PLAN_FILE = "experts.json"
SCORES = "scores"
"""Folder of the score sheets that sites sent, by evaluation."""


@dataclass(frozen=True)
class Home:
    """A folder that has a run.toml."""

    folder: Path

    @classmethod
    def found(cls, folder: Path) -> Self:
        """Raises PierError when it is no run's."""
        if not (folder / RUN_FILE).exists():
            raise PierError(
                f"{folder} has no {RUN_FILE}",
                "`pier-coordinator init FOLDER` makes a run; --data FOLDER names the one that is meant.",
            )
        return cls(folder)

    @cached_property
    def config(self) -> RunConfig:
        """Raises PierError."""
        return load(self.folder / RUN_FILE)

    @cached_property
    def identity(self) -> Identity:
        """Made at the first use. Raises PierError."""
        return Identity.load_or_create(self.folder)

    @cached_property
    def token(self) -> Token:
        """The run's secret; made at the first use. Raises PierError when run.toml is not the one it was made for."""
        token = Token.load(self.folder)
        if token is None:
            token = Token.new(self.config.hash())
            token.save(self.folder)
        if token.run != self.config.hash()[: len(token.run)]:
            raise PierError(
                f"{self.folder / RUN_FILE} has changed since the run began",
                "Put it back as it was, a configuration never changes; or `pier-coordinator init` another run.",
            )
        return token

    @cached_property
    def operator(self) -> str:
        """What actions need; made at the first use."""
        path = self.folder / OPERATOR_FILE
        if not path.exists():
            write_private(path, f"{secrets.token_urlsafe(24)}\n".encode())
        return path.read_text().strip()

    @property
    def database(self) -> Path:
        """Where it is."""
        return self.folder / DATABASE

    def credentials(self) -> Credentials:
        """What proves to sites who the coordinator is."""
        return credentials(self.identity, self.token)

    @cached_property
    def authority(self) -> Authority:
        """What the coordinator signs for the run. Raises PierError."""
        return Authority(self.token, self.config.hash())

    def announce(self, address: str, page: str) -> None:
        """Let this machine's commands find the coordinator that runs; `page` is its URL."""
        fields = {"pid": os.getpid(), "address": address, "http": page}
        durable.replace(self.folder / DAEMON_FILE, json.dumps(fields).encode())

    def leave(self) -> None:
        """It runs no more."""
        (self.folder / DAEMON_FILE).unlink(missing_ok=True)
