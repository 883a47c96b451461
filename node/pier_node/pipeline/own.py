"""What one replica of a stage did by itself since the last outer round: its weights, AdamW's moments, what it has seen.

Every step is on the disk before the round that decides about it, beside the one before. It becomes the site's when
that round counts it. If the site cannot know that any more, because others have counted later steps, it goes on from
the last outer round: all that is lost is what this replica did since then.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from pier_node.kept_state import KeptStates
from pier_node.outer.state import OuterState
from pier_node.pipeline.tally import round_of

BASE, MICROBATCHES = "base", "microbatches"
"""Entries of a state's ledger: the version that it began from, and the microbatches that came since."""

log = logging.getLogger(__name__)


class Own:
    """The steps of one site, in `folder`.

    Attributes:
        state: after the last one that counts; None: there is none. Its `round` names the attempt, as versions do.
    """

    def __init__(self, folder: Path, run_hash: bytes) -> None:
        self._disk = KeptStates(folder, run_hash)
        self.state: OuterState | None = None
        self._open: dict[int, OuterState] = {}

    def resume(self, decided: int) -> None:
        """Take up what the disk has, after a start. Blocks.

        Args:
            decided: the last round of which this site knew how it ended.
        """
        for version in self._disk.rounds():
            found = self._disk.of(version)
            if found and round_of(version) > decided:
                self._open[version] = found
            elif found:
                self.state = found
                return

    def keep(self, state: OuterState) -> None:
        """Keep a step on the disk until it is known whether it counts. Blocks. Raises PierError."""
        self._disk.save(state, beside=self.state.round if self.state else None)
        self._open[state.round] = state

    def settle(self, known: Collection[int], counted: int, decided: int) -> bool:
        """Take the kept step that counts, if any; whether the state is another one now. Blocks. Raises PierError.

        Args:
            known: versions that have counted for certain.
            counted: the one that counted last.
            decided: the last round of which this site knows how it ended.
        """
        if not self._open:
            return False
        tried = max(round_of(version) for version in self._open)
        taken = next((state for version, state in self._open.items() if version in known), None)
        if taken is None and decided < tried:
            return False
        if taken is None and round_of(counted) > tried:
            log.warning("what this replica did since the last outer round is lost: did its last step count?")
            self.forget()
            return True
        for version in self._open.keys() - known:
            self._disk.drop(version)
        self._open.clear()
        self.state = taken or self.state
        return taken is not None

    def forget(self) -> None:
        """Have none. Blocks. Raises PierError."""
        self.state = None
        self._open.clear()
        for version in self._disk.rounds():
            self._disk.drop(version)
