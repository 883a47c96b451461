"""`pier-node init`: writes a run.toml to begin with."""

from __future__ import annotations

from pathlib import Path

from pier_node.base.toml import write_new
from pier_node.config.commented import run_toml

LONGEST = 1024
"""Tokens of a sequence, at most, in the run.toml of a model that was trained on longer ones."""


def init(path: Path, preset: str, force: bool, name: str = "", weights: Path | None = None) -> str:
    """Write the file for a run called `name`. Returns the message for the user.

    Raises:
        PierError: it exists (without `force`), or cannot be written.
    """
    how = f"  pier-node start --run {path}"
    if weights is None:
        text = run_toml(preset, name)
    else:
        from pier_node.trainer.model.export import read_config

        tokenizer = weights / "tokenizer.json"
        model = read_config(weights)
        if model.form == "llama":  # rotary positions: a run may train on shorter sequences than the model can read
            model = model.model_copy(update={"context": min(model.context, LONGEST)})
        text = run_toml("", name, model, str(tokenizer.absolute()) if tokenizer.exists() else "")
        how += f" --from {weights}"
    write_new(path, text, force)
    return (
        f"Wrote {path}: every setting of a run, with its meaning.\n"
        "Say in it how many sites there are ([run] sites), then found the run at the first of them:\n\n"
        f"{how}\n"
    )
