"""Pier's own trainer as a program of a site: how its daemon starts it, and what it is told then."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from pier_node.config.run import RunConfig, from_canonical
from pier_node.engine.program import Program
from pier_node.engine.training_process import Child, Command
from pier_node.trainer.data.corpus import SiteData
from pier_node.trainer.early_start import log_file, words
from pier_node.trainer.parallel import DDP, Parallel

SETUP_VARIABLE = "PIER_TRAINER"
"""Environment variable: the trainer's Setup, as JSON."""


@dataclass(frozen=True)
class Setup:
    """What the trainer has to know before it attaches.

    Attributes:
        config: RunConfig in its canonical form.
        node: decides, with the seed of the run, the order of the rows.
        data_path: see SiteData.
        tokenizer: the path of data.tokenizer at this site.
        parallel: how the workers share the model.
        samples: log a sample of text after each evaluation.
    """

    config: str
    node: str
    data_path: str | None
    tokenizer: str = "bytes"
    parallel: Parallel = DDP
    samples: bool = False

    @property
    def run(self) -> RunConfig:
        """The run's configuration at this site."""
        return from_canonical(self.config).with_tokenizer(self.tokenizer)

    @classmethod
    def of_environment(cls) -> Self:
        """That of this process."""
        keys = json.loads(os.environ[SETUP_VARIABLE])
        return cls(**{**keys, "parallel": Parallel(**keys["parallel"])})

    def environment(self) -> dict[str, str]:
        """The variables of a process with this setup."""
        return {SETUP_VARIABLE: json.dumps(asdict(self))}


@dataclass(frozen=True)
class Workers:
    """The workers of a site, as its operator wants them.

    Attributes:
        count: how many; 0: one per device.
        parallel: how they share the model.
        early: see early_start.py.
        samples: whether they log samples of text.
    """

    count: int = 0
    parallel: Parallel = DDP
    early: Child | None = None
    samples: bool = False


def own_trainer(config: RunConfig, node: str, data: SiteData, folder: Path, workers: Workers) -> Program:
    """Pier's own trainer at a site, with its place in the run; it is not started yet.

    `folder`, that of the node, receives `logs/workers.log` and `cache`.
    """
    setup = Setup(config.canonical(), node, data.path, config.data.tokenizer, workers.parallel, workers.samples)
    command = Command(words(workers.count), setup.environment(), log_file(folder), workers.early)
    program = Program(None, command)
    program.place(config, data.slot, data.slots, folder / "cache")
    return program
