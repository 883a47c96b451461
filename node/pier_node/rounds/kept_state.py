"""The newest committed states; each is on disk before this site says that it has it.

The checkpoint of a round may have to wait, because with overlap a round is committed in the middle of inner steps. When
it is written, it shares the state's file (checkpoint.py), so that a state is written only once.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from safetensors import SafetensorError

from pier_node.base.durable import Torn, read_sealed, sync
from pier_node.base.errors import PierError
from pier_node.outer.state import OuterState
from pier_node.rounds.checkpoint import RECORD, STATE, read_state, state_record, write_record, write_state

KEEP = 2
"""Number of states kept: the checkpoint of the last but one may still be on its way to disk."""

log = logging.getLogger(__name__)


class KeptStates:
    """The last states of one run, each in a folder named after its round."""

    def __init__(self, folder: Path, run_hash: bytes) -> None:
        self._folder, self._run_hash = folder, run_hash.hex()

    def save(self, state: OuterState, beside: int | None = None) -> None:
        """Return once the state would survive a power cut. Blocks; call it in a thread.

        Args:
            beside: a round whose state is kept too, however many come after it.

        Raises:
            PierError: the disk is full or failing; the earlier states are unchanged.
        """
        folder, temporary = self._named(state.round), self._folder / "unfinished"
        if self.file_of(state):
            return
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            write_state(temporary, state)
            write_record(temporary, state_record(state, self._run_hash))
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
            sync(self._folder)
            kept = None if beside is None else self._named(beside)
            for old in self._found()[KEEP:]:
                if old != kept:
                    shutil.rmtree(old)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            problem = f"cannot keep the state of round {state.round} in {self._folder}: {error}"
            raise PierError(problem, "Free some space there and start again.") from error

    def file_of(self, state: OuterState) -> Path | None:
        """The file with exactly this state's vectors; None if the state is not kept."""
        folder = self._named(state.round)
        try:
            kept = folder.exists() and read_sealed(folder / RECORD)["digest"] == state.digest.hex()
        except Torn:
            return None
        return folder / STATE if kept else None

    def after(self, round: int) -> OuterState | None:
        """The newest undamaged state, if its round is later than the given one."""
        for folder in self._found():
            try:
                record = read_sealed(folder / RECORD)
                if record["run_hash"] == self._run_hash:
                    return read_state(folder, record) if record["round"] > round else None
            except Torn as torn:  # it was being written, so no peer has received it
                log.info("%s: %s", folder, torn)
        return None

    def of(self, round: int) -> OuterState | None:
        """The state of a round, if it is here and undamaged."""
        folder = self._named(round)
        if not folder.exists():
            return None
        try:
            record = read_sealed(folder / RECORD)
            return read_state(folder, record) if record["run_hash"] == self._run_hash else None
        except Torn as torn:
            log.info("%s: %s", folder, torn)
            return None

    def rounds(self) -> list[int]:
        """Rounds of the states that are here, the newest first."""
        return [int(it.name.partition("-")[2]) for it in self._found()]

    def drop(self, round: int) -> None:
        """Remove the state of a round, so that not even a power cut restores it. Blocks. Raises PierError."""
        try:
            if self._named(round).exists():
                shutil.rmtree(self._named(round))
                sync(self._folder)
        except OSError as error:
            raise PierError(f"cannot remove {self._named(round)}: {error}", "Is that disk failing?") from error

    def _named(self, round: int) -> Path:
        return self._folder / f"round-{round:08d}"

    def _found(self) -> list[Path]:
        return sorted(self._folder.glob("round-*"), key=lambda it: int(it.name.partition("-")[2]), reverse=True)
