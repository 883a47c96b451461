"""What benches train that are about what sites do, not about what they learn.

Text that every machine has; nothing is validated on the way.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

Keys = Mapping[str, str | float | bool]
NOTHING: Keys = MappingProxyType({})


def tiny_run(
    sites: int,
    total_steps: int,
    inner_steps: int,
    outer: Keys = NOTHING,
    model: Keys = NOTHING,
    batch_size: int = 2,
    witness: bool = False,
    text: str = argparse.__file__,
    pipeline: Keys = NOTHING,
) -> str:
    """The text of a run.toml.

    Args:
        outer, model, pipeline: what these tables have besides; otherwise it is DiLoCo with the smallest model.
        text: path of what is trained on: 100 kB, which are enough for four sites.
    """
    tables: dict[str, Keys] = {
        "run": {"sites": sites, "witness": witness},
        "model": {"preset": "llama-tiny", **model},
        "data": {"source": "text", "path": text},
        "inner": {"total_steps": total_steps, "batch_size": batch_size, "eval_every": 0},
        "outer": {"algorithm": "diloco", "inner_steps": inner_steps, **outer},
        "pipeline": pipeline,
    }
    return written({name: table for name, table in tables.items() if table})


def written(tables: Mapping[str, Keys]) -> str:
    """The text of a run.toml that has only these keys."""
    lines = {name: [f"{key} = {json.dumps(value)}" for key, value in table.items()] for name, table in tables.items()}
    return "\n".join(f"[{name}]\n" + "\n".join(each) for name, each in lines.items()) + "\n"


def packages(checkout: Path) -> list[Path]:
    """The folders that PYTHONPATH has to name for the code of a checkout."""
    return [checkout / name for name in ("node", "coordinator", "protos")]
