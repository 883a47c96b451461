"""Checkpoints of a node: all that it needs to continue where it was, in files that survive a crash.

    checkpoints/round-00000042/state.safetensors   the outer state, guarded by the digest that its members voted for
                               local.safetensors   what only this site has: AdamW moments, unsent update,
                                                  residual of error feedback
                               checkpoint.json     everything else, and the digests of both files' tensors

A folder is written under another name, flushed to disk, and only then renamed.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pier_node.base.durable import Torn, forbidden, read_sealed, seal, sync
from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector
from pier_node.outer.state import ADAM_M, ADAM_V, PIECE, OuterState, piece_hashes, state_digest

FORMAT = 1
STATE, LOCAL, RECORD = "state.safetensors", "local.safetensors", "checkpoint.json"
PENDING, RESIDUAL = "pending", "residual"
KEEP = 2
"""Number of checkpoints that a node keeps; while it saves, the disk holds one more."""
LISTINGS = 5
"""How often a reader lists the folder again if the daemon rotated away what it was reading."""

_NAME = re.compile(r"round-(\d{8,})(\.old)?")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A node at rest.

    Attributes:
        state: the last committed state.
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
    adam_m: SharedVector | None
    adam_v: SharedVector | None
    adam_step: int
    inner_step: int
    tokens: int
    pending: SharedVector | None
    pending_tokens: tuple[int, ...]
    residual: SharedVector | None = None

    @property
    def local(self) -> dict[str, SharedVector]:
        """The vectors that are not in the state, by their names in local.safetensors."""
        named = {ADAM_M: self.adam_m, ADAM_V: self.adam_v, PENDING: self.pending, RESIDUAL: self.residual}
        return {name: vector for name, vector in named.items() if vector is not None}


class CheckpointStore:
    """The `keep` newest checkpoints of one run in one folder.

    One process at a time saves and loads there; others may `peek` and read the `newest_state` meanwhile.
    """

    def __init__(self, folder: Path, run_hash: bytes, keep: int = KEEP) -> None:
        assert keep >= 1
        self._folder = folder
        self._run_hash = run_hash.hex()
        self._keep = keep
        self._saving = threading.Lock()

    def save(self, checkpoint: Checkpoint, state_file: Path | None = None) -> Path:
        """Write a checkpoint, then delete those that rotation drops. Blocks; call it in a thread, or in several.

        The vectors are read in place, so `adam_m`, `adam_v`, `pending` and `residual` must not be written meanwhile.

        Args:
            state_file: file that already holds the state's vectors, to be shared.

        Raises:
            PierError: the disk is full or failing; the earlier checkpoints are unchanged.
        """
        with self._saving:
            return self._save(checkpoint, state_file)

    def _save(self, checkpoint: Checkpoint, state_file: Path | None) -> Path:
        final = self._folder / f"round-{checkpoint.state.round:08d}"
        temporary = final.with_suffix(".tmp")
        try:
            self._delete(*self._folder.glob("*.tmp"))
            temporary.mkdir(parents=True)
            _write(temporary, checkpoint, self._run_hash, state_file)
            self._swap_in(temporary, final)
            self._rotate(final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            problem = f"cannot save a checkpoint in {self._folder}: {error}"
            raise PierError(problem, "Free some space there and start again.") from error
        return final

    def newest(self) -> Checkpoint | None:
        """The newest undamaged checkpoint; None if there is none. Damaged ones are logged and set aside.

        Raises:
            PierError: it belongs to another run, a newer Pier wrote it, or this user may not read it.
        """
        for folder in self._found():
            try:
                return self._load(folder)
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
                    return read_state(folder, self._record_in(folder))
                except Torn as problem:
                    log.warning("checkpoint %s is not used: %s", folder, problem)
            if all(folder.exists() for folder in listed):
                break
        return None

    def _load(self, folder: Path) -> Checkpoint:
        return _read(folder, self._record_in(folder))

    def _record_in(self, folder: Path) -> dict[str, Any]:
        record = read_sealed(folder / RECORD)
        if record["format"] != FORMAT:
            raise PierError(f"{folder} has format {record['format']}, this Pier reads {FORMAT}", "Update pier-node.")
        if record["run_hash"] != self._run_hash:
            problem = f"{folder} belongs to another run: its configuration has the hash {record['run_hash'][:12]}"
            raise PierError(problem, "Give this run its own --data folder, or join the run that the folder is of.")
        return record

    def _found(self) -> list[Path]:
        """Checkpoint folders, newest first; a folder that was being replaced comes after its replacement."""
        names = [(match, path) for path in self._folder.glob("round-*") if (match := _NAME.fullmatch(path.name))]
        return [path for match, path in sorted(names, key=lambda it: (-int(it[0][1]), it[1].name))]

    def _swap_in(self, temporary: Path, final: Path) -> None:
        # A folder cannot be replaced in one step: between the two renames `.old` is the checkpoint, as `_found` knows.
        if final.exists():
            old = final.with_suffix(".old")
            self._delete(old)
            final.rename(old)
        temporary.rename(final)
        sync(self._folder)

    def _rotate(self, saved: Path) -> None:
        replaced = [path for path in self._found() if path.suffix and path.with_suffix("").exists()]
        others = [path for path in self._found() if path not in (saved, *replaced)]
        self._delete(*replaced, *others[self._keep - 1 :])

    def _set_aside(self, folder: Path, problem: Torn) -> None:
        aside = folder.with_name(f"damaged-{folder.name}")
        self._delete(aside)
        folder.rename(aside)
        log.warning("checkpoint %s is damaged and not used: %s; moved to %s", folder, problem, aside.name)

    @staticmethod
    def _delete(*folders: Path) -> None:
        for folder in folders:
            if folder.exists():
                shutil.rmtree(folder)


def _write(folder: Path, checkpoint: Checkpoint, run_hash: str, state_file: Path | None) -> None:
    try:
        os.link(state_file or "", folder / STATE)
    except OSError:  # there is no such file, it was rotated away just now, or the file system has no hard links
        write_state(folder, checkpoint.state)
    _save_tensors(folder / LOCAL, checkpoint.local)
    write_record(folder, _record(checkpoint, run_hash))


def write_state(folder: Path, state: OuterState) -> None:
    """Write the vectors of a state. Raises OSError, SafetensorError."""
    _save_tensors(folder / STATE, state.tensors)


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the record that seals a folder: nothing in the folder counts before. Raises OSError."""
    (folder / RECORD).write_bytes(seal(record))
    sync(folder / RECORD)
    sync(folder)


def state_record(state: OuterState, run_hash: str) -> dict[str, Any]:
    """Everything in a state except its vectors."""
    return {
        "format": FORMAT,
        "run_hash": run_hash,
        "round": state.round,
        "members": list(state.members),
        "ledger": dict(state.ledger),
        "outer_adam_step": state.adam_step,
        "digest": state.digest.hex(),
    }


def _record(checkpoint: Checkpoint, run_hash: str) -> dict[str, Any]:
    state = checkpoint.state
    return {
        **state_record(state, run_hash),
        "adam_step": checkpoint.adam_step,
        "inner_step": checkpoint.inner_step,
        "tokens": checkpoint.tokens,
        "pending_tokens": checkpoint.pending_tokens,
        "local_digest": _local_digest(state, checkpoint.adam_step, checkpoint.local),
    }


def read_state(folder: Path, record: dict[str, Any]) -> OuterState:
    """The state that a record describes. Raises Torn."""
    tensors = _load_tensors(folder / STATE)
    members, ledger = tuple(record["members"]), record["ledger"]
    state = OuterState(record["round"], members, tensors, ledger, record["outer_adam_step"])
    if state.digest.hex() != record["digest"]:
        raise Torn(f"{STATE} does not match its digest")
    return state


def _read(folder: Path, record: dict[str, Any]) -> Checkpoint:
    state = read_state(folder, record)
    local = _load_tensors(folder / LOCAL)
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


def _save_tensors(path: Path, tensors: Mapping[str, SharedVector]) -> None:
    save_file({name: vector.array for name, vector in tensors.items()}, path)
    sync(path)


def _load_tensors(path: Path) -> dict[str, SharedVector]:
    try:
        with safe_open(path, "np") as file:
            return {name: _vector(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 (not a dict)
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
