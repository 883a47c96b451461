"""What a site keeps on disk about its rounds: checkpoints, kept states and an event log.

checkpoints/   the newest checkpoints of this site
states/        committed states that other sites rely on
events.jsonl   the site's status after each committed round, one JSON object per line
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from pier_node.engine.supervisor import Moments
from pier_node.outer.state import OuterState
from pier_node.rounds.checkpoint import Checkpoint, CheckpointStore
from pier_node.rounds.folder import EVENTS_FILE
from pier_node.rounds.kept_state import KeptStates
from pier_node.site.report import Status
from pier_node.site.status import finite


class Archive:
    """The files of one site of one run.

    Args:
        saved: called with each state that from now on would survive a power cut; used in a run of pairs.
        status: returns this site's status.
        checkpoints: name of the checkpoint folder. A pipeline's sites use another one for the run's state, because they
            hold no whole model.
    """

    def __init__(
        self,
        folder: Path,
        run_hash: bytes,
        saved: Callable[[OuterState], None],
        status: Callable[[], Status],
        checkpoints: str = "checkpoints",
    ) -> None:
        self._checkpoints = CheckpointStore(folder / checkpoints, run_hash)
        self._states = KeptStates(folder / "states", run_hash)
        self._events, self._saved, self._status = folder / EVENTS_FILE, saved, status

    async def newest(self) -> Checkpoint | None:
        """The newest checkpoint; None if there is none. Raises PierError."""
        return await asyncio.to_thread(self._checkpoints.newest)

    def has(self, round: int) -> bool:
        """Whether the newest checkpoint is of that round. Raises PierError."""
        found = self._checkpoints.peek()
        return found is not None and found[1]["round"] == round

    def kept_after(self, round: int) -> OuterState | None:
        """A state that was kept without a checkpoint, if it is of a later round."""
        return self._states.after(round)

    def moments(self) -> Moments | None:
        """AdamW's moments in the newest checkpoint."""
        saved = self._checkpoints.newest()
        if saved is None or saved.adam_m is None or saved.adam_v is None:
            return None
        return saved.adam_m.array, saved.adam_v.array, saved.adam_step

    async def commit(self, checkpoint: Checkpoint) -> None:
        """Save the checkpoint of a committed round and log the round. Raises PierError."""
        await asyncio.to_thread(self.save, checkpoint)
        self._saved(checkpoint.state)
        self.note(checkpoint.state)

    async def keep(self, state: OuterState) -> None:
        """Store a committed state, before this site announces that it has it. Raises PierError."""
        await asyncio.to_thread(self._states.save, state)
        self._saved(state)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint. Blocks. Raises PierError."""
        self._checkpoints.save(checkpoint, self._states.file_of(checkpoint.state))

    def note(self, state: OuterState) -> None:
        """Append a line to the event log. With overlap this site may already be at a later state than the one noted."""
        told = {"round": state.round, "digest": state.digest.hex(), "members": list(state.members)}
        event = {"time": time.time(), "pid": os.getpid(), **self._status(), **told}
        event.pop("peers")
        with self._events.open("a") as file:
            file.write(json.dumps(finite(event)) + "\n")
