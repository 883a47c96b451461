"""The means of the last rounds, as they travelled: a site that missed these rounds takes their outer steps from them.

A state is 8 bytes a parameter; a mean with int4 is half a byte, and that of one of n fragments an nth of it. Without
them, a site whose line brings a state in more time than a round takes would be behind again with each state, for ever.
With them, the rounds that were missed while the state arrived take less time than the state did, and so on, until the
site is there. As many means are kept as a state has bytes: a line on which a round's own traffic is in time brings a
state within half as many rounds.

No mean is trusted. The steps lead to the hashes of the state that a proof names, or what differs is fetched.

Only means that are encoded are kept. One of sparse codes needs the weights of the round, too, and is not.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pier_node.base.shared import Buffer, SharedVector
from pier_node.config.run import RunConfig
from pier_node.outer.advance import advance
from pier_node.outer.codec import BadCode, Codec, codec
from pier_node.outer.layout import Layout
from pier_node.outer.schedule import Kind, round_plan, synced
from pier_node.outer.state import OuterState
from pier_node.rounds.exchange_plan import CHUNK
from pier_node.rounds.reduce import Codes
from pier_node.wire.carrier import CHUNK_BYTES, BadMessage

MEANS = "means"
"""Folder of the means in a site's data folder."""
STATE_BYTES = 8
"""Bytes a parameter of a state."""

log = logging.getLogger(__name__)


class MeanFiles:
    """Files with the encoded means of the last rounds: a line that lists their chunks, and the chunks.

    Args:
        most: bytes of all files; a round's file goes when later ones need its room.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most

    def keep(self, round: int, codes: Codes) -> None:
        """Keep the mean of a committed round. Blocks; call it in a thread.

        Nothing is flushed, and a full disk only logged: another site has the mean, and a state will do as well.
        """
        index = json.dumps([(start, len(codes[start])) for start in sorted(codes)]).encode()
        path, unfinished = self._path(round), self._folder / "unfinished"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                file.writelines((index, b"\n", *(codes[start] for start in sorted(codes))))
            unfinished.replace(path)
            self._rotate(path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            log.warning("the mean of round %d is not kept for sites that missed it: %s", round, error)

    def _rotate(self, newest: Path) -> None:
        left = self._most
        for path in sorted(self._folder.glob("round-*.mean"), reverse=True):
            left -= path.stat().st_size
            if left < 0 and path != newest:
                path.unlink()

    def chunks(self, round: int) -> Iterator[tuple[int, bytes]]:
        """The codes of a round's mean in order, each with its first element. Blocks. Raises BadMessage."""
        try:
            with self._path(round).open("rb") as file:
                for start, size in json.loads(file.readline()):
                    code = file.read(size)
                    if len(code) != size:
                        raise BadMessage(f"the mean of round {round} is damaged here")
                    yield start, code
        except (OSError, ValueError, TypeError) as error:
            raise BadMessage(f"the mean of round {round} is not here") from error

    def _path(self, round: int) -> Path:
        return self._folder / f"round-{round:08d}.mean"


class Means:
    """What a site needs of missed rounds, both when it missed them and when others did."""

    def __init__(self, config: RunConfig, layout: Layout, files: MeanFiles) -> None:
        self._config, self._layout, self._files = config, layout, files
        self._codec = codec(config.outer.codec, config.outer.density)
        self.chunks = files.chunks

    @classmethod
    def of_site(cls, folder: Path, config: RunConfig, layout: Layout) -> Means:
        """The means in a site's data folder."""
        return cls(config, layout, MeanFiles(folder / MEANS, STATE_BYTES * layout.length))

    def keep(self, round: int, codes: Codes) -> None:
        """Keep the mean of a committed round, if a site that missed it could do anything with it. Blocks."""
        if self._suffices(round):
            self._files.keep(round, codes)

    def missing(self, state: OuterState, round: int) -> range:
        """The rounds that lead from a state to that of `round`, if their means are fewer bytes than a state."""
        rounds, left = range(state.round + 1, round + 1), STATE_BYTES * self._layout.length
        for number in rounds:
            left -= self._codec.size(synced(self._config, number, self._layout.length))
            if left < 0 or not self._suffices(number):
                return range(0)
        return rounds

    def step(self, state: OuterState) -> MissedStep:
        """The outer step after a state."""
        return MissedStep(self._config, self._layout, self._codec, state)

    def _suffices(self, round: int) -> bool:
        """Whether the step of a round needs nothing but its mean."""
        return self._codec.lossy and not self._codec.sparse and round_plan(self._config, round).kind is Kind.LOCAL


class MissedStep:
    """An outer step that other sites have taken, from the chunks of its mean.

    Attributes:
        megabytes: of 2^20 bytes each, that the mean has; a part of one counts as one.
    """

    def __init__(self, config: RunConfig, layout: Layout, codec: Codec, state: OuterState) -> None:
        self._config, self._layout, self._codec, self._state = config, layout, codec, state
        self.round = state.round + 1
        self._mean = SharedVector.scratch(synced(config, self.round, layout.length))
        self.megabytes = math.ceil(codec.size(len(self._mean.array)) / CHUNK_BYTES)
        self._start = 0
        self._code: Buffer | None = None

    def add(self, start: int, code: Buffer) -> None:
        """Take the next chunk. Raises BadMessage."""
        self._decode(start)
        self._start, self._code = start, code

    def taken(self) -> OuterState:
        """The state after the step, without the members and tokens of the round. Raises BadMessage."""
        self._decode(len(self._mean.array))
        plan = round_plan(self._config, self.round)
        return advance(self._state, self._mean, {}, plan, self._layout, self._config.inner)

    def _decode(self, end: int) -> None:
        """Decode the chunk that ends here."""
        if self._code is None and end == 0:
            return
        if self._code is None or not self._start < end <= min(len(self._mean.array), self._start + CHUNK):
            raise BadMessage(f"a chunk of a mean from {self._start} to {end}")
        try:
            self._mean.array[self._start : end] = self._codec.decode(self._code, end - self._start)
        except BadCode as bad:
            raise BadMessage(f"the mean at {self._start}: {bad}") from bad
