"""`pier-node init`: writes a run.toml to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pier_node.base.toml import write_new
from pier_node.config.choice import choice
from pier_node.config.commented import run_toml
from pier_node.config.run import InnerSection, OuterSection

LONGEST = 1024
"""Tokens of a sequence, at most, in the run.toml of a model that was trained on longer ones."""


def init(path: Path, preset: str, force: bool, name: str = "", weights: Path | None = None, steps: int = 0) -> str:
    """Write the file for a run called `name`, of `steps` inner steps (0: the default). Returns a message for the user.

    Raises:
        PierError: it exists (without `force`), or cannot be written.
    """
    how = f"  pier-node start --run {path}"
    inner = InnerSection(total_steps=steps) if steps else InnerSection()
    outer, why = choice(inner.total_steps, OuterSection().inner_steps)
    tables: dict[str, Any] = {"inner": {"total_steps": inner.total_steps}, "outer": outer}
    if name:
        tables["run"] = {"name": name}
    if weights is None:
        tables["model"] = {"preset": preset} if preset else {}
    else:
        from pier_node.trainer.model.export import read_config

        tokenizer = weights / "tokenizer.json"
        model = read_config(weights)
        if model.form == "llama":  # rotary positions: a run may train on shorter sequences than the model can read
            model = model.model_copy(update={"context": min(model.context, LONGEST)})
        tables["model"] = model.model_dump()
        if tokenizer.exists():
            tables["data"] = {"tokenizer": str(tokenizer.absolute())}
        how += f" --from {weights}"
    write_new(path, run_toml(tables, why), force)
    return (
        f"Wrote {path}: every setting of a run, with its meaning.\n"
        "Say in it how many sites there are ([run] sites), then found the run at the first of them:\n\n"
        f"{how}\n"
    )
