"""The state store: a folder of numbered states that survive a crash. Each is sealed, checksummed and replaced whole.

    round-00000042/state.safetensors   the outer state, guarded by the digest that its members voted for
                   local.safetensors   in a checkpoint only: what no other site has (AdamW moments, unsent update,
                                       residual of error feedback)
                   checkpoint.json     everything else, and the digests of both files' tensors; it seals the folder

A site keeps its checkpoints in such a folder: all that it needs to resume where it was. Other folders hold committed
states, which are on disk before the site says that it has them. With overlap, a round is committed in the middle of
inner steps and its checkpoint has to wait; the checkpoint then shares the state's file, so that a state is written only
once. A site of a pipeline keeps the versions of its stage likewise (pipeline/stage_state.py).

A folder is written under another name, flushed to disk, and only then renamed.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pier_node.base.durable import Torn, forbidden, read_sealed, seal, sync, unwritable
from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector, Vector
from pier_node.outer.state import ADAM_M, ADAM_V, PIECE, OuterState, piece_hashes, state_digest

FORMAT = 1
STATE, LOCAL, RECORD = "state.safetensors", "local.safetensors", "checkpoint.json"
PENDING, RESIDUAL = "pending", "residual"
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a site's data folder."""
STATES = "states"
"""Folder of the committed states that other sites rely on."""
KEEP = 2
"""Number of states in a store: of two checkpoints, the older is there in case that the newer is damaged; of two states,
the older one's checkpoint may still be on its way to disk. While a store saves, its disk holds one more."""
LISTINGS = 5
"""How often a reader lists the folder again if the daemon rotated away what it was reading."""

EARLIER = "unfinished"
"""Name under which earlier versions wrote a state."""

_NAME = re.compile(r"round-(\d{8,})(\.old)?")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A node at rest.

    Attributes:
        adam_m: this site's first AdamW moments, shape [parameters]; None if it has none, or if `state` has them.
        adam_v: its second moments, shape [parameters].
        adam_step: number of AdamW steps that the moments are made of.
        inner_step: inner steps since the start of the run.
        tokens: tokens trained on since the start of the run.
        pending: unsent update (pseudo-gradient that no round has taken yet), shape [parameters].
        pending_tokens: number of tokens behind each fragment of it.
        residual: what a lossy codec has dropped so far, shape [parameters].
    """

    state: OuterState
    adam_m: SharedVector | None = None
    adam_v: SharedVector | None = None
    adam_step: int = 0
    inner_step: int = 0
    tokens: int = 0
    pending: SharedVector | None = None
    pending_tokens: tuple[int, ...] = ()
    residual: SharedVector | None = None

    @property
    def local(self) -> dict[str, SharedVector]:
        """The vectors that are not in the state, by their names in local.safetensors."""
        named = {ADAM_M: self.adam_m, ADAM_V: self.adam_v, PENDING: self.pending, RESIDUAL: self.residual}
        return {name: vector for name, vector in named.items() if vector is not None}

    @property
    def moments(self) -> tuple[Vector, Vector, int] | None:
        """AdamW's moments, shape [parameters] each, and their step, if they are not in the state."""
        if self.adam_m is None or self.adam_v is None:
            return None
        return self.adam_m.array, self.adam_v.array, self.adam_step


class StateStore:
    """The newest states of one run in one folder, some or all of them with what makes a state a checkpoint.

    One process at a time writes there; others may `peek` and read the `newest_state` meanwhile.

    Args:
        keep: number of states to keep, besides those that a call of `keep` names.
        shares: a store whose files checkpoints share when it holds the same state.
    """

    def __init__(self, folder: Path, run_hash: bytes, keep: int = KEEP, shares: StateStore | None = None) -> None:
        assert keep >= 1
        self._folder = folder
        self._run_hash = run_hash.hex()
        self._keep = keep
        self._shares = shares
        self._saving = threading.Lock()
        self._written = deque[bytes](maxlen=KEEP)  # digests of the states that this process wrote last

    # --- writing ---------------------------------------------------------------------------------

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, then delete what rotation drops. Blocks; call it in a thread, or in several.

        The vectors are read in place, so `adam_m`, `adam_v`, `pending` and `residual` must not be written meanwhile.

        Raises:
            PierError: the disk is full or failing; the earlier checkpoints are unchanged.
        """
        with self._saving:
            return self._put(checkpoint.state, checkpoint, (), f"cannot save a checkpoint in {self._folder}")

    def keep(self, state: OuterState, beside: Collection[int] = ()) -> None:
        """Return once the state would survive a power cut. Blocks; call it in a thread.

        Args:
            beside: rounds whose states are kept too, however many come after them.

        Raises:
            PierError: the disk is full or failing; the earlier states are unchanged.
        """
        with self._saving:
            if self._file_of(state) and (state.digest in self._written or self._is_sound(state)):
                return
            problem = f"cannot keep the state of round {state.round} in {self._folder}"
            self._put(state, None, beside, problem)

    def _is_sound(self, state: OuterState) -> bool:
        """Whether the file of a state that an earlier process wrote is not damaged."""
        here = self.of(state.round)
        return here is not None and here.digest == state.digest

    def drop(self, round: int) -> None:
        """Remove the state of a round, so that not even a power cut restores it. Blocks. Raises PierError."""
        with self._saving:
            folders = [folder for folder in self._found() if _round(folder) == round]
            try:
                self._delete(*folders)
                if folders:
                    sync(self._folder)
            except OSError as error:
                raise unwritable(f"cannot remove {folders[0]}", error) from error

    def _put(self, state: OuterState, checkpoint: Checkpoint | None, beside: Collection[int], problem: str) -> Path:
        final = self._folder / f"round-{state.round:08d}"
        temporary = final.with_suffix(".tmp")
        try:
            self._delete(*self._folder.glob("*.tmp"), self._folder / EARLIER)
            temporary.mkdir(parents=True)
            self._write(temporary, state, checkpoint)
            self._swap_in(temporary, final)
            self._rotate(final, beside)
            self._written.append(state.digest)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise unwritable(problem, error) from error
        return final

    def _write(self, folder: Path, state: OuterState, checkpoint: Checkpoint | None) -> None:
        """Write all files; nothing in the folder counts before the record, which comes last."""
        shared = self._shares._file_of(state) if self._shares else None
        try:
            os.link(shared or "", folder / STATE)
        except OSError:  # there is no such file, it was rotated away just now, or the file system has no hard links
            save_tensors(folder / STATE, _arrays(state.tensors))
        record = {
            "format": FORMAT,
            "run_hash": self._run_hash,
            "round": state.round,
            "members": list(state.members),
            "ledger": dict(state.ledger),
            "outer_adam_step": state.adam_step,
            "digest": state.digest.hex(),
        }
        if checkpoint:
            save_tensors(folder / LOCAL, _arrays(checkpoint.local))
            record |= {
                "adam_step": checkpoint.adam_step,
                "inner_step": checkpoint.inner_step,
                "tokens": checkpoint.tokens,
                "pending_tokens": checkpoint.pending_tokens,
                "local_digest": _local_digest(state, checkpoint.adam_step, checkpoint.local),
            }
        (folder / RECORD).write_bytes(seal(record))
        sync(folder / RECORD)
        sync(folder)

    def _swap_in(self, temporary: Path, final: Path) -> None:
        # A folder cannot be replaced in one step: between the two renames `.old` is the state, as `_found` knows.
        if final.exists():
            old = final.with_suffix(".old")
            self._delete(old)
            final.rename(old)
        temporary.rename(final)
        sync(self._folder)

    def _rotate(self, saved: Path, beside: Collection[int]) -> None:
        replaced = [path for path in self._found() if path.suffix and path.with_suffix("").exists()]
        others = [path for path in self._found() if path not in (saved, *replaced)]
        self._delete(*replaced, *(path for path in others[self._keep - 1 :] if _round(path) not in beside))

    @staticmethod
    def _delete(*folders: Path) -> None:
        for folder in folders:
            if folder.exists():
                shutil.rmtree(folder)

    # --- reading ---------------------------------------------------------------------------------

    def newest(self) -> Checkpoint | None:
        """The newest undamaged checkpoint; None if there is none. Damaged ones are logged and set aside.

        Raises:
            PierError: it belongs to another run, a newer Pier wrote it, or this user may not read it.
        """
        for folder in self._found():
            try:
                return _read(folder, self._record_in(folder))
            except Torn as problem:
                self._set_aside(folder, problem)
        return None

    def peek(self) -> tuple[Path, dict[str, Any]] | None:
        """Folder and record of the newest checkpoint, without its vectors; changes nothing. Raises PierError."""
        for folder in self._found():
            try:
                return folder, self._record_in(folder)
            except Torn as problem:
                log.info("%s: %s", folder, problem)
        return None

    def newest_state(self) -> OuterState | None:
        """The state of the newest undamaged checkpoint; changes nothing. Raises PierError as `newest` does."""
        for _ in range(LISTINGS):
            listed = self._found()
            for folder in listed:
                try:
                    return _read_state(folder, self._record_in(folder))
                except Torn as problem:
                    log.warning("checkpoint %s is not used: %s", folder, problem)
            if all(folder.exists() for folder in listed):
                break
        return None

    def rounds(self) -> list[int]:
        """Rounds of the states that are here, the newest first."""
        return list(dict.fromkeys(map(_round, self._found())))

    def of(self, round: int) -> OuterState | None:
        """The state of a round, if it is here, undamaged and of this run."""
        for folder, record in self._of_run(round):
            try:
                return _read_state(folder, record)
            except Torn as torn:
                log.info("%s: %s", folder, torn)
        return None

    def ledger(self, round: int) -> dict[str, int] | None:
        """The ledger of a round's state, if it is here and of this run; its vectors are not read."""
        return next((record["ledger"] for _, record in self._of_run(round)), None)

    def _of_run(self, round: int) -> Iterator[tuple[Path, dict[str, Any]]]:
        for folder in self._found():
            try:
                if _round(folder) == round and (record := read_sealed(folder / RECORD))["run_hash"] == self._run_hash:
                    yield folder, record
            except Torn as torn:
                log.info("%s: %s", folder, torn)

    def after(self, round: int) -> OuterState | None:
        """The newest undamaged state of this run, if its round is later than the given one."""
        return next((state for it in self.rounds() if it > round and (state := self.of(it))), None)

    def _file_of(self, state: OuterState) -> Path | None:
        """The file with exactly this state's vectors; None if the state is not here."""
        folder = self._folder / f"round-{state.round:08d}"
        try:
            here = folder.exists() and read_sealed(folder / RECORD)["digest"] == state.digest.hex()
        except Torn:
            return None
        return folder / STATE if here else None

    def _record_in(self, folder: Path) -> dict[str, Any]:
        record = read_sealed(folder / RECORD)
        if record["format"] != FORMAT:
            raise PierError(f"{folder} has format {record['format']}, this Pier reads {FORMAT}", "Update pier-node.")
        if record["run_hash"] != self._run_hash:
            problem = f"{folder} belongs to another run: its configuration has the hash {record['run_hash'][:12]}"
            raise PierError(problem, "Give this run its own --data folder, or join the run that the folder is of.")
        return record

    def _found(self) -> list[Path]:
        """Folders of states, newest first; a folder that was being replaced comes after its replacement."""
        found = [path for path in self._folder.glob("round-*") if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: (-_round(path), path.name))

    def _set_aside(self, folder: Path, problem: Torn) -> None:
        aside = folder.with_name(f"damaged-{folder.name}")
        self._delete(aside)
        folder.rename(aside)
        self._delete(*sorted(self._folder.glob("damaged-round-*"))[:-KEEP])
        log.warning("checkpoint %s is damaged and not used: %s; moved to %s", folder, problem, aside.name)


def _round(folder: Path) -> int:
    return int(folder.stem.partition("-")[2])


def _read_state(folder: Path, record: dict[str, Any]) -> OuterState:
    """The state that a record describes. Raises Torn."""
    tensors, _ = load_tensors(folder / STATE)
    members, ledger = tuple(record["members"]), record["ledger"]
    state = OuterState(record["round"], members, tensors, ledger, record["outer_adam_step"])
    if state.digest.hex() != record["digest"]:
        raise Torn(f"{STATE} does not match its digest")
    return state


def _read(folder: Path, record: dict[str, Any]) -> Checkpoint:
    state = _read_state(folder, record)
    local, _ = load_tensors(folder / LOCAL)
    if _local_digest(state, record["adam_step"], local) != record["local_digest"]:
        raise Torn(f"{LOCAL} does not match its digest")
    return Checkpoint(
        state=state,
        adam_m=local.get(ADAM_M),
        adam_v=local.get(ADAM_V),
        adam_step=record["adam_step"],
        inner_step=record["inner_step"],
        tokens=record["tokens"],
        pending=local.get(PENDING),
        pending_tokens=tuple(record["pending_tokens"]),
        residual=local.get(RESIDUAL),
    )


def _local_digest(state: OuterState, adam_step: int, local: Mapping[str, SharedVector]) -> str:
    hashes = {name: piece_hashes(vector.array) for name, vector in local.items()}
    return state_digest(state.round, state.members, state.ledger, adam_step, hashes).hex()


def _arrays(vectors: Mapping[str, SharedVector]) -> dict[str, Vector]:
    return {name: vector.array for name, vector in vectors.items()}


def save_tensors(path: Path, tensors: Mapping[str, Vector], metadata: Mapping[str, str] | None = None) -> None:
    """Write vectors into a safetensors file; return once it is on disk. Raises OSError."""
    try:
        save_file(dict(tensors), path, dict(metadata) if metadata else None)
    except SafetensorError as error:  # a system error that the library wraps
        code = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(code[1]) if code else errno.EIO, f"{path.name}: {error}") from error
    sync(path)


def load_tensors(path: Path) -> tuple[dict[str, SharedVector], dict[str, str]]:
    """The vectors of a safetensors file, and its metadata.

    Raises:
        Torn: the file is missing or damaged.
        PierError: this user may not read it.
    """
    try:
        with safe_open(path, "np") as file:
            vectors = {name: _vector(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return vectors, file.metadata() or {}
    except PermissionError as error:
        raise forbidden(path, error) from error
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise Torn(f"{path.name}: {error}") from error


def _vector(stored: Any) -> SharedVector:
    # Copy piece by piece: the file is memory-mapped, and memory never holds a second whole copy of it.
    (length,) = stored.get_shape()
    vector = SharedVector.scratch(length)
    for start in range(0, length, PIECE):
        end = min(start + PIECE, length)
        vector.array[start:end] = stored[start:end]
    return vector
