"""The workers of a site as its daemon sees them: one object that trains, and that survives the death of a process.

A job is idempotent. After a restart it is sent again with its initial state, from shared memory, and the caller notices
only a delay.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pier_node.base.shared import SharedVector
from pier_node.config.run import RunConfig
from pier_node.engine.messages import Done, Evaluate, Evaluated, Job, Progress, Rate, Rated, Setup
from pier_node.engine.supervisor import Answer, Moments, Request, SharedMoments, Supervisor, WorkerGroup
from pier_node.outer.layout import Layout
from pier_node.trainer.data.corpus import SiteData


class Workers:
    """The workers of one site.

    Args:
        config: the run.
        node: this site's node id.
        data: its training data.
        folder: this node's folder; receives `logs/workers.log` and `cache`.
        count: number of workers to start; 0: one per device.

    Attributes:
        outbox: what the last job published: θ, or the site's mean gradient; shape [parameters].
        adam_m, adam_v: AdamW's moments after the last job that published θ; initially zeros.
        recover_moments: called in a thread when a worker died while it wrote the moments; if it returns None: zeros.
    """

    def __init__(self, config: RunConfig, node: str, data: SiteData, folder: Path, count: int) -> None:
        length = Layout.of(config.model).length
        self.outbox, self._moments = SharedVector(length), SharedMoments(length, lambda: self.recover_moments())
        self.adam_m, self.adam_v = self._moments.first, self._moments.second
        self.recover_moments: Callable[[], Moments | None] = lambda: None
        setup = Setup(
            config=config.canonical(),
            node=node,
            slot=data.slot,
            slots=data.slots,
            data_path=data.path,
            cache=str(folder / "cache"),
            outbox=self.outbox.path,
            adam_m=self.adam_m.path,
            adam_v=self.adam_v.path,
            length=length,
        )
        self._supervisor = Supervisor(setup, self._moments, folder / "logs" / "workers.log", count)
        self._ids, self._turn = itertools.count(1), asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def adam_step(self) -> int:
        """Number of AdamW steps behind adam_m and adam_v."""
        return self._moments.step

    def moments(self) -> tuple[SharedVector, SharedVector, int] | None:
        """AdamW's moments, and the number of steps behind them; None: none yet."""
        return (self.adam_m, self.adam_v, self.adam_step) if self.adam_step else None

    @property
    def team(self) -> WorkerGroup | None:
        """The running workers; None before they have started."""
        return self._supervisor.team

    async def start(self) -> None:
        """Start the workers; return when all have connected. Raises PierError when they do not."""
        await self._supervisor.start()

    async def run(
        self,
        first_step: int,
        steps: int,
        sequences: int,
        payload: Literal["weights", "gradient"],
        load: SharedVector,
        adam_step: int | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Done:
        """Have the workers do a job, and wait until its result is in the shared vectors.

        Cancelling this does not stop the job, whose result still arrives; the next job begins after it.

        Args:
            first_step: index of the first inner step in the whole run.
            steps: number of inner steps; 1 for a gradient.
            sequences: number that the site trains on per step.
            payload: what to publish in `outbox`. With "gradient" no step is taken: neither θ nor the moments change.
            load: initial weights; not `outbox`, because the job may have to start again.
            adam_step: if given, start with the moments now in `adam_m` and `adam_v`, which are that many steps old.
            on_progress: called a few times per second with the progress.

        Raises:
            PierError: the workers cannot do it, or died too often; says why, and where the log is.
        """
        job = Job(
            id=next(self._ids),
            first_step=first_step,
            steps=steps,
            sequences=sequences,
            payload=payload,
            load=load.path,
            load_adam=adam_step is not None,
            adam_step=adam_step or 0,
        )
        done = await self._ask(job, load, on_progress)
        assert isinstance(done, Done)
        return done

    async def evaluate(self, weights: SharedVector) -> float:
        """Validation loss of these weights in nats per token. Raises PierError as `run` does."""
        evaluated = await self._ask(Evaluate(next(self._ids), weights.path), weights)
        assert isinstance(evaluated, Evaluated)
        return evaluated.loss

    async def rate(self, weights: SharedVector, rows: Path) -> npt.NDArray[np.float64]:
        """Mean loss of each row of a file with these weights in nats per token, [rows]. Raises PierError as `run` does.

        Args:
            rows: .npy, [rows, context + 1] token ids.
        """
        rated = await self._ask(Rate(next(self._ids), weights.path, str(rows)), weights)
        assert isinstance(rated, Rated)
        return np.array(rated.losses)

    async def stop(self) -> None:
        """End all workers within seconds; a job in progress is cancelled."""
        for task in self._tasks:
            task.cancel()
        await self._supervisor.stop()

    async def _ask(
        self,
        request: Request,
        weights: SharedVector,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Answer:
        async def asked(_weights: SharedVector) -> Answer:
            # The weights stay in memory as long as the request may have to be sent again.
            async with self._turn:
                return await self._supervisor.ask(request, on_progress)

        task = asyncio.create_task(asked(weights))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)
