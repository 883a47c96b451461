"""Token files: one flat array as .npy, written as a stream, and a fingerprint that tells when one was damaged."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from pier_node.data.tokens import Tokens

BLOCK = 1 << 16
BLOCKS = 256
"""Blocks of BLOCK bytes that a fingerprint looks at: all of a file up to 16 MiB, evenly spread ones beyond."""


class TokenWriter:
    """Appends tokens to a new .npy file; the file is whole after `close`."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._file = path.open("wb")
        self._dtype = dtype
        self.length = 0
        self._write_header()

    def append(self, tokens: Tokens) -> None:
        """Add ids, each of which fits the file's type."""
        self._file.write(tokens.astype(self._dtype, copy=False).tobytes())
        self.length += len(tokens)

    def close(self) -> None:
        """Put the length in the header, where NumPy leaves room for 21 digits, and bring all of it to disk."""
        self._file.seek(0)
        self._write_header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _write_header(self) -> None:
        description = np.lib.format.dtype_to_descr(self._dtype)
        header = {"shape": (self.length,), "fortran_order": False, "descr": description}
        np.lib.format.write_array_header_1_0(self._file, header)


def fingerprint(path: Path) -> str:
    """Size and CRC-32 of a file's blocks, in a time that does not grow with the file."""
    size, crc = path.stat().st_size, 0
    spread = (index * (size - BLOCK) // (BLOCKS - 1) for index in range(BLOCKS))
    with path.open("rb") as file:
        for start in spread if size > BLOCK * BLOCKS else range(0, size, BLOCK):
            file.seek(start)
            crc = zlib.crc32(file.read(BLOCK), crc)
    return f"{size}-{crc:08x}"
