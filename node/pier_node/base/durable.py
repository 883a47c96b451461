"""Durable files: after a crash a file has either its old or its new content, and records carry a checksum."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pier_node.base.errors import PierError


class Torn(Exception):
    """A file on disk is not what was written; the message says which file and why."""


def sync(path: Path) -> None:
    """Return once a file, or the list of names in a folder, is on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Write a file so that a reader, even after a power cut, sees either the old or the new bytes. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_bytes(data)
        put(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def put(written: Path, path: Path) -> None:
    """Give a file that is written its name, as `replace` does. Raises OSError."""
    sync(written)
    written.replace(path)
    sync(path.parent)


def seal(fields: Mapping[str, Any]) -> bytes:
    """JSON of `fields`, with their SHA-256."""
    return json.dumps({**fields, "checksum": _checksum(fields)}, indent=1, sort_keys=True).encode()


def read_sealed(path: Path) -> dict[str, Any]:
    """The fields of a file that `seal` made.

    Raises:
        Torn: the file is missing, is not JSON, or its checksum does not match its fields.
        PierError: this user may not read it.
    """
    try:
        fields = json.loads(path.read_bytes())
    except PermissionError as error:
        raise forbidden(path, error) from error
    except OSError as error:
        raise Torn(f"{path.name}: {error.strerror}") from error
    except ValueError as error:
        raise Torn(f"{path.name} is not JSON: {error}") from error
    if not isinstance(fields, dict) or fields.pop("checksum", None) != _checksum(fields):
        raise Torn(f"{path.name} does not match its checksum")
    return fields


def forbidden(path: Path, error: OSError) -> PierError:
    """The error for a file that may be intact but that this user may not read."""
    return PierError(f"{path}: {error.strerror}", "Start pier-node as the user that owns the --data folder.")


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk without room, or inodes, for this user."""


def unwritable(problem: str, error: OSError) -> PierError:
    """The error for something that could not be written, with what helps against the cause."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            remedy = "Free some space there and start again, or use a folder on another disk."
        case errno.EACCES | errno.EPERM:
            remedy = "Start again as the user that owns this folder."
        case errno.EROFS:
            remedy = "Make this disk writable and start again: an error of its own may be why it is not."
        case _:
            remedy = "See what the system's log says of this disk, then start again."
    return PierError(f"{problem}: {error.strerror or error}", remedy)


def _checksum(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
