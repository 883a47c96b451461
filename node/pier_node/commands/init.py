"""`pier-node init`: writes a run.toml to begin with, and chooses the outer algorithm that loses least.

From docs/results.md, "Convergence": with a hundred rounds plain DiLoCo (arXiv 2311.08105) after a solo start stays
nearest to synchronous training, with a lower momentum and a higher learning rate than its paper has. Pier's schedule
was published with two thousand rounds (arXiv 2511.17849).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pier_node.base.toml import write_new
from pier_node.config.commented import run_toml
from pier_node.config.presets import RECIPES, RUN_TOML, TOKENIZER
from pier_node.config.run import InnerSection, OuterSection

MANY = 1000
"""Rounds from which the schedule of the paper is taken: between a hundred and two thousand, nothing was measured."""
FEW: dict[str, Any] = {"algorithm": "diloco", "start": "solo", "momentum": 0.8, "lr": 0.8}


def choice(total_steps: int, inner_steps: int) -> tuple[dict[str, Any], str]:
    """Keys of [outer] for a run of that many inner steps, and why."""
    rounds = total_steps // inner_steps
    if rounds >= MANY:
        return {"algorithm": "pier"}, f'Chosen for {rounds:,} rounds (total_steps / inner_steps): "pier" as published.'
    why = (
        f"Chosen for {rounds:,} rounds (total_steps / inner_steps): below {MANY:,}, DiLoCo with a solo start and these "
        'momentum and lr lost least (docs/results.md); from there on, use "pier" and leave the others out.'
    )
    return FEW, why


FAMILY = {"llama": "Llama 2 (32,000 tokens)", "gpt2": "GPT-2 (50,257 tokens)"}
"""Whose vocabulary a preset has, by the first word of its name."""
LONGEST = 1024
"""Tokens of a sequence, at most, in the run.toml of a model that was trained on longer ones."""


def init(
    path: Path,
    preset: str,
    force: bool,
    weights: Path | None = None,
    steps: int = 0,
    run: Mapping[str, Any] | None = None,
) -> str:
    """Write the file for a run of `steps` inner steps (0: the default), with these keys of [run].

    Returns a message for the user.

    Raises:
        PierError: it exists (without `force`), or cannot be written.
    """
    how, tables = f"  {_start(path)}", recipe(preset if weights is None else "", steps)
    outer, why = choice(tables["inner"]["total_steps"], OuterSection().inner_steps)
    tables["outer"] = outer
    tables["run"] = {**(run or {})}
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
        f"{_missing(tables)}"
        f"{_how_many(tables['run'].get('sites', 0))}\n\n{how}\n"
    )


def _start(path: Path) -> str:
    return "pier-node start" if path == RUN_TOML else f"pier-node start --run {path}"


def _how_many(sites: int) -> str:
    if not sites:
        return "Say in it how many sites there are ([run] sites), then found the run at the first of them:"
    many = "one site" if sites == 1 else f"{sites} sites"
    return f"It is for {many}. Found the run at the first of them; it prints how others join:"


def recipe(preset: str, steps: int = 0) -> dict[str, dict[str, Any]]:
    """The tables of run.toml in which a preset's size is trained as usual, in `steps` inner steps (0: as usual)."""
    tables = {section: {**keys} for section, keys in RECIPES.get(preset, {}).items()}
    inner = tables.setdefault("inner", {"total_steps": InnerSection().total_steps})
    if steps:
        inner["total_steps"] = steps
        if "warmup_steps" in inner:
            inner["warmup_steps"] = min(inner["warmup_steps"], steps // 10)
    return tables


def _missing(tables: dict[str, dict[str, Any]]) -> str:
    tokenizer = tables.get("data", {}).get("tokenizer", "bytes")
    if tokenizer != TOKENIZER:
        return ""
    family = FAMILY[tables["model"]["preset"].split("-")[0]]
    return f"Put the {TOKENIZER} of {family} here, or set another in [data], with text to train on.\n"
