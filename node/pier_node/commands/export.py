"""`pier-node export`: the newest checkpoint of a site as a folder that Hugging Face's libraries load."""

from __future__ import annotations

from pathlib import Path

from pier_node.commands.weights import newest_weights
from pier_node.errors import PierError
from pier_node.model import export as writer


def export(data: Path, out: Path) -> str:
    """Write the folder; returns what to tell the user. Raises PierError."""
    _check(out)
    weights = newest_weights(data)
    writer.export(weights.config, weights.flat, out, weights.tokenizer)
    return (
        f"Wrote {weights.origin}, {len(weights.flat):,} parameters in fp32, with its tokenizer, to {out}\n\n"
        f"  pier-node generate --model {out} PROMPT\n"
        f"  transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})\n"
    )


def _check(out: Path) -> None:
    """Refuse to mix a model into a folder of other things. Raises PierError."""
    if out.is_dir() and any(out.iterdir()) and not (out / "tokenizer_config.json").exists():
        raise PierError(f"{out} holds other files than an exported model", "Name a new folder, or an earlier export.")
