"""`pier-node export`: the newest checkpoint of a site as a folder that Hugging Face's libraries load."""

from __future__ import annotations

from pathlib import Path

from pier_node.base.errors import PierError
from pier_node.rounds.weights import newest_weights
from pier_node.trainer.model import export as writer


def export(data: Path, out: Path, force: bool = False) -> str:
    """Write the folder. Returns the message for the user.

    Raises:
        PierError: `out` contains something that no export wrote (without `force`), or cannot be written.
    """
    if not (force or writer.is_ours(out)):
        raise PierError(
            f"{out} is not empty, and `pier-node export` did not write what is in it",
            "Name a new folder. With --force a model that is there is replaced, for good.",
        )
    weights = newest_weights(data)
    writer.export(weights.config, weights.flat, out, weights.tokenizer)
    return (
        f"Wrote {weights.origin}, {len(weights.flat):,} parameters in fp32, with its tokenizer, to {out}\n\n"
        f"  pier-node generate --model {out} PROMPT\n"
        f"  transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})\n"
    )
