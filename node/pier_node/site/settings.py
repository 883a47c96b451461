"""The settings that a site is started with, and which of them it keeps for the next start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pier_node.base.faults import NO_FAULTS, Faults, kill_at
from pier_node.config.run import RunConfig
from pier_node.engine.training_process import Child
from pier_node.rounds.folder import SiteRecord
from pier_node.trainer.parallel import AUTO, Parallel
from pier_node.wire.transport import Transport

LISTEN = "0.0.0.0:7700"


@dataclass(frozen=True)
class Settings:
    """The options of `pier-node start`.

    Attributes:
        folder: the data directory.
        run: path of run.toml.
        listen, advertise: HOST:PORT; see wire/addresses.py. Empty, or None: as before.
        data: this site's own text, instead of data.path of run.toml; None: as before.
        shared_data: `data` holds the same text as at the other sites: see trainer/data/corpus.py.
        workers: number of worker processes; 0: one per device.
        parallel: how they share the model.
        checkpoint_every: rounds between two checkpoints.
        transport: None: the one that this site used before, or gRPC.
        http: port of the status page on 127.0.0.1; 0: any.
        trust: fingerprint of a committed state that a newcomer trusts; empty: it trusts the founder.
        coordinator: HOST:PORT of the run's coordinator; its token is an invite.
        command: starts the site's own training program (--exec); empty: Pier's trainer, or a program that is there.
        program_socket: where a program that has started this daemon will attach; see engine/program.py.
        weights: a folder in Hugging Face's format that has the weights to found a run from; None: from the run's seed.
        founding: the run to found, instead of the one in `run`.
        early: Pier's trainer, which was started before this site knows what it trains: see trainer/early_start.py.
    """

    folder: Path
    run: Path | None = None
    peers: tuple[str, ...] = ()
    token: str | None = None
    name: str = ""
    listen: str = ""
    advertise: str | None = None
    data: str | None = None
    shared_data: bool = False
    workers: int = 0
    parallel: Parallel = AUTO
    checkpoint_every: int = 1
    http: int = 0
    insecure: bool = False
    transport: Transport | None = None
    fail_at: str = ""
    coordinator: str | None = None
    trust: str = ""
    command: str = ""
    program_socket: Path | None = None
    weights: Path | None = None
    founding: RunConfig | None = None
    early: Child | None = None

    @property
    def has_program(self) -> bool:
        """Whether a program of the site's owner trains, instead of Pier's own trainer."""
        return self.program is not None

    @property
    def program(self) -> str | None:
        """What trains here, as SiteRecord has it."""
        return self.command if self.command or self.program_socket else None

    @property
    def faults(self) -> Faults:
        """Where a test makes this site die."""
        return kill_at(self.fail_at) if self.fail_at else NO_FAULTS

    def after(self, record: SiteRecord | None) -> Self:
        """These settings, with missing ones filled in from the last start or from defaults."""
        before = record or SiteRecord(founder=False, slot=0)
        return replace(
            self,
            listen=self.listen or before.listen or LISTEN,
            advertise=self.advertise or before.advertise or None,
            data=self.data or before.dataset or None,
            shared_data=self.shared_data or (self.data is None and bool(before.dataset) and before.shared_data),
        )

    def noted(self, record: SiteRecord) -> SiteRecord:
        """The record, with the settings that the next start needs."""
        noted = replace(record, listen=self.listen, advertise=self.advertise or "")
        return replace(noted, dataset=self.data or "", shared_data=self.shared_data, program=self.program)
