"""The run's tokenizer.json on its way to a site that joins.

A run names it by its SHA-256 (data.tokenizer_hash). Each site keeps a copy in its data folder. It copies a file that it
has already; otherwise the site or the coordinator that lets it in sends the file, in parts.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path

from pier_node.base import durable
from pier_node.config.presets import BESIDE, TOKENIZER
from pier_node.config.run import RunConfig
from pier_node.wire.carrier import CHUNK_BYTES, TOKENIZER_BYTES, BadMessage
from pier_proto.v1.peer_pb2 import TokenizerPart, TokenizerRequest

PATIENCE = 60.0
"""Seconds for a part."""

Ask = Callable[[TokenizerRequest], Awaitable[TokenizerPart]]

log = logging.getLogger(__name__)


def with_copy(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration with the path of the copy in this folder, if there is one."""
    copy = (folder / TOKENIZER).absolute()
    return config.with_tokenizer(str(copy)) if config.data.tokenizer_hash and copy.exists() else config


def located(config: RunConfig, folder: Path, others: Iterable[Path] = ()) -> RunConfig | None:
    """The configuration with a path at which the run's file is found; None if the run has one and it is not here.

    Args:
        others: further paths to try, after this folder and the configured path.
    """
    if not config.data.tokenizer_hash:
        return config
    for path in (folder / TOKENIZER, Path(config.data.tokenizer).expanduser(), *others):
        with suppress(OSError):
            if path.is_file() and path.stat().st_size <= TOKENIZER_BYTES:
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                if digest == config.data.tokenizer_hash:
                    return config.with_tokenizer(str(path.absolute()))
    return None


def keep(config: RunConfig, folder: Path, others: Iterable[Path] = ()) -> RunConfig | None:
    """As `located`, with a copy in this folder, and of what lies beside the file. Raises OSError."""
    found = located(config, folder, others)
    copied = str((folder / TOKENIZER).absolute())
    if found is None or not config.data.tokenizer_hash or found.data.tokenizer == copied:
        return found
    source = Path(found.data.tokenizer)
    for name in BESIDE:
        (folder / name).unlink(missing_ok=True)
        if (beside := source.with_name(name)).is_file() and beside.stat().st_size <= TOKENIZER_BYTES:
            durable.replace(folder / name, beside.read_bytes())
    return _kept(config, folder, source.read_bytes())


def _kept(config: RunConfig, folder: Path, content: bytes) -> RunConfig:
    copy = folder / TOKENIZER
    if copy.exists():
        log.warning("%s is not the run's, and is replaced", copy)
    durable.replace(copy, content)
    return with_copy(config, folder)


def part(config: RunConfig, request: TokenizerRequest) -> TokenizerPart:
    """A part of the file. Blocks. Raises BadMessage."""
    if not config.data.tokenizer_hash:
        raise BadMessage("this run has no tokenizer.json that sites give each other")
    path = Path(config.data.tokenizer).expanduser()
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(request.offset)
            data = file.read(CHUNK_BYTES)
    except OSError as error:
        raise BadMessage(f"the file is not there either: {error.strerror or error}") from error
    if not data or size > TOKENIZER_BYTES:
        raise BadMessage(f"no part from byte {request.offset} on is sent of a tokenizer.json of {size} bytes")
    return TokenizerPart(data=data, size=size)


async def fetch(config: RunConfig, folder: Path, ask: Ask) -> RunConfig:
    """Get the file in parts and keep it. Returns the configuration with its path.

    Raises BadMessage, and what `ask` raises.
    """
    content, size = bytearray(), 1
    while len(content) < size:
        answer = await ask(TokenizerRequest(offset=len(content)))
        size = answer.size
        if size > TOKENIZER_BYTES or len(answer.data) != min(CHUNK_BYTES, size - len(content)):
            raise BadMessage(f"{len(answer.data)} bytes from byte {len(content)} on, of a tokenizer.json of {size}")
        content += answer.data
    if hashlib.sha256(content).hexdigest() != config.data.tokenizer_hash:
        raise BadMessage("its tokenizer.json is not the run's: it has another SHA-256")
    return await asyncio.to_thread(_kept, config, folder, bytes(content))
