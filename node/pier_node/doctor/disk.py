"""Disk that the checkpoints of a site need, against what is free."""

from __future__ import annotations

from pathlib import Path

import psutil

from pier_node.checkpoint import KEEP
from pier_node.doctor.finding import THIS_SITE, Finding, Verdict
from pier_node.units import amount

CHECKPOINT_BYTES = 20
"""Bytes a parameter of a checkpoint at its largest: anchor, momentum, AdamW's two moments, pending; fp32."""


def disk_finding(folder: Path, parameters: int, free: int) -> Finding:
    """Whether the disk holds the checkpoints that are kept and the one that is being written, besides what is there.

    Args:
        free: bytes on the folder's disk.
    """
    there = sum(file.stat().st_size for file in (folder / "checkpoints").rglob("*") if file.is_file())
    needed = max(0, (KEEP + 1) * CHECKPOINT_BYTES * parameters - there)
    detail = f"checkpoints need {amount(needed)} {'more ' if there else ''}in {folder}; {amount(free)} free"
    values = {"needed_bytes": needed, "free_bytes": free}
    if free >= needed:
        return Finding(THIS_SITE, "disk", Verdict.OK, detail, "", values)
    remedy = f"Free {amount(needed - free)} on that disk, or give a --data folder on a larger one."
    return Finding(THIS_SITE, "disk", Verdict.PROBLEM, detail, remedy, values)


def free_disk(folder: Path) -> int:
    """Bytes free where a folder is, or will be."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return int(psutil.disk_usage(str(there)).free)
