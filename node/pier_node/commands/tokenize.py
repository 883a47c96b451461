"""`pier-node tokenize`: the tokens of a run's data, made once, for any site to train on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from pier_node.base.durable import Torn
from pier_node.base.errors import PierError
from pier_node.base.units import amount, count, several
from pier_node.config.run import DataSection, load
from pier_node.trainer.data.corpus import SiteData, check_data
from pier_node.trainer.data.shards import MANIFEST, TokenManifest
from pier_node.trainer.data.tokenizing import Text, Told, locked, tokenize, whole

TELL = 0.2
"""Seconds between two changes of the progress bar."""


def tokenize_run(run: Path, out: Path, dataset: str | None, processes: int) -> Iterator[str]:
    """Tokenize what [data] of a run.toml names, or `dataset`. Yields messages for the user.

    Args:
        out: folder of the tokens; one that is unfinished is continued. With a mixture, it gets a folder per source.
        processes: 0: one for every two cores, or none if the text is small.

    Raises:
        PierError: the data cannot be read, no site could train on it, or `out` has something else.
    """
    config = load(run)
    data = config.data
    check_data(config, SiteData(path=dataset))
    parts = [(1.0, data)] if dataset else data.parts()
    lines = list[str]()
    for number, (weight, part) in enumerate(parts, 1):
        folder = out / f"{number}-{part.source}" if len(parts) > 1 else out
        if part.source == "tokens" and not dataset:
            folder = Path(part.path)
            yield f"{folder} has tokens already"
        else:
            yield _one(Text.of(part, 0, 1, dataset), folder, processes)
        lines += _config(folder, data, weight if len(parts) > 1 else None)
    yield "\n".join(["", "In run.toml:", "", *lines, ""])


def _one(text: Text, folder: Path, processes: int) -> str:
    with locked(folder, folder / ".lock"):
        began, manifest = time.monotonic(), whole(folder, text.key())
        if manifest:
            return f"{folder} has all of these tokens: {_amount(manifest)}"
        before = _unfinished(folder, text.key())
        with _progress(folder) as told:
            manifest = tokenize(text, folder, told, processes or None, TELL)
    seconds = time.monotonic() - began
    speed = f"{amount((manifest.read - before) / seconds)} of text a second"
    return f"Wrote {_amount(manifest)} to {folder}, in {seconds:.1f} s: {speed}"


def _unfinished(folder: Path, key: str) -> int:
    """Bytes of text that an earlier run has read. Raises PierError: the folder has something else."""
    found = [path for path in folder.iterdir() if path.name not in (".lock", f"{MANIFEST}.tmp")]
    try:
        manifest = TokenManifest.load(folder) if folder / MANIFEST in found else None
    except Torn as error:
        raise PierError(f"{folder}: {error}", "Remove the folder, and run the same command again.") from error
    if found and (manifest is None or manifest.key != key):
        problem = f"{folder} is not empty, and what is in it was not made from this text with this tokenizer"
        raise PierError(problem, "Name a new folder, or remove this one.")
    return manifest.read if manifest and not manifest.complete else 0


def _amount(manifest: TokenManifest) -> str:
    train, held_out = (sum(shard.tokens for shard in split) for split in (manifest.train, manifest.validation))
    shards = several(len(manifest.train) + len(manifest.validation), "shard")
    return f"{count(train)} tokens to train on and {count(held_out)} for validation, in {shards}"


def _config(folder: Path, data: DataSection, weight: float | None) -> list[str]:
    lines = ['source = "tokens"', f"path = {_toml(str(folder))}"]
    tokenizer = f"tokenizer = {_toml(data.tokenizer)}"
    return ["[data]", *lines, tokenizer] if weight is None else ["[[data.mixture]]", *lines, f"weight = {weight:.6g}"]


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # TOML knows no halves of a surrogate pair


@contextmanager
def _progress(folder: Path) -> Iterator[Told]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"tokenizing into {folder}", total=None)

        def told(read: int, size: int) -> None:
            # Text of compressed files is larger than they are, and a stream has no size.
            progress.update(task, completed=read, total=size if read < size else None)

        yield told
