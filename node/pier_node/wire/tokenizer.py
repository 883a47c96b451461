"""The run's tokenizer.json on its way to a site that joins.

A run names it by its SHA-256 (data.tokenizer_hash). Each site keeps a copy in its data folder: of a file that is there
already, or else of what it is sent, in parts, by whoever lets it in: another site, or the coordinator.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from pier_node.base import durable
from pier_node.config.presets import TOKENIZER
from pier_node.config.run import RunConfig
from pier_node.wire.carrier import CHUNK_BYTES, TOKENIZER_BYTES, BadMessage
from pier_proto.v1.peer_pb2 import TokenizerPart, TokenizerRequest

PATIENCE = 60.0
"""Seconds for a part."""

Ask = Callable[[TokenizerRequest], Awaitable[TokenizerPart]]


def with_copy(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration, in which the path of the tokenizer is that of this folder's copy, if there is one."""
    copy = (folder / TOKENIZER).absolute()
    if not config.data.tokenizer_hash or not copy.exists():
        return config
    return config.with_tokenizer(str(copy))


def is_missing(config: RunConfig, folder: Path, others: Iterable[Path] = ()) -> bool:
    """Whether the run has a tokenizer.json that is neither in this folder, nor at its path, nor at another one."""
    return bool(config.data.tokenizer_hash) and not _found(config, folder, others)


def keep(config: RunConfig, folder: Path, others: Iterable[Path] = ()) -> RunConfig:
    """Copy the file into this folder, if it is somewhere here. Returns the configuration with the path of the copy."""
    copy = folder / TOKENIZER
    if config.data.tokenizer_hash and (found := _found(config, folder, others)) and found[0] != copy:
        durable.replace(copy, found[1])
    return with_copy(config, folder)


def _found(config: RunConfig, folder: Path, others: Iterable[Path]) -> tuple[Path, bytes] | None:
    for path in (folder / TOKENIZER, Path(config.data.tokenizer).expanduser(), *others):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if hashlib.sha256(content).hexdigest() == config.data.tokenizer_hash:
            return path, content
    return None


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
        raise BadMessage(f"the run's tokenizer.json is not here: {error.strerror or error}") from error
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
    await asyncio.to_thread(durable.replace, folder / TOKENIZER, bytes(content))
    return with_copy(config, folder)
