"""The text of a run.toml that shows every key of RunConfig: what it means, what is allowed, its default.

Sections, keys, defaults and bounds are read from the models of config.py, meanings from their docstrings.
"""

from __future__ import annotations

from collections.abc import Sequence

from pier_node.commands.commented_toml import Notes, commented
from pier_node.config import RunConfig
from pier_node.model.presets import PRESETS

HEAD = """\
# A run of Pier: what all of its sites agree on. It never changes once the run has begun.
# What is particular to one site (addresses, devices, its --dataset) are options of `pier-node start`.
# Every key has a default and may be left out. A line `#key = …` shows what follows from another key of its
# section: take the # away to change it.
"""

MEANINGS = {
    "run.name": "What people call the run.",
    "run.seed": "Of the first weights, and of the order in which sites see their data.",
    "model.preset": "A model by name; keys of this section that follow from it can be changed one by one.",
    "model.form": "Llama: RMSNorm, rotary positions, SwiGLU. GPT-2: LayerNorm, learnt positions, GELU.",
    "model.vocab_size": "Token ids that the model knows; as many as the tokenizer has, or more.",
    "model.dim": "Width of the residual stream; a multiple of heads.",
    "model.layers": "Blocks.",
    "model.heads": "Heads of attention.",
    "model.kv_heads": "Heads of keys and values, shared by groups of heads; divides heads. llama only.",
    "model.ffn_dim": "Width inside a block's feed-forward layer.",
    "model.context": "Tokens in a sequence.",
    "model.rope_theta": "Base of the rotary positions. llama only.",
    "model.tie_embeddings": "Whether the output layer is the embedding.",
    "data.source": "Python's own library as a text that every machine has, or files of text, JSON lines or Parquet.",
    "data.path": "File or folder of the text, the same at every site. With --dataset a site has text of its own.",
    "data.text_field": "The field (jsonl) or column (parquet) that holds the text.",
    "inner.lr": "Learning rate at its highest, after the warmup.",
    "inner.min_lr": "Learning rate at the end of its cosine decay.",
    "inner.warmup_steps": "Inner steps over which the learning rate rises from 0.",
    "inner.weight_decay": "AdamW's, for matrices only.",
    "inner.beta1": "AdamW's decay of the first moment.",
    "inner.beta2": "AdamW's decay of the second moment.",
    "inner.precision": "Of the arithmetic of inner steps; auto is bf16 where the GPU has it. Weights are always fp32.",
    "inner.compile": "Whether to train through torch.compile: minutes to begin, then faster on most GPUs.",
    "inner.eval_batches": "Batches in a validation.",
    "outer.algorithm": "How sites exchange; keys of this section that follow from it can be changed one by one.",
    "outer.start": "The first part of the run: by one site with everybody's batch, by all synchronously, or none.",
    "outer.momentum_warmup": "Whether the start gathers outer momentum.",
    "outer.schedule": "Of the outer momentum and learning rate: the paper's steps, cosines, or constants.",
}
"""Of keys that have no docstring in config.py."""

DECIDES: dict[str, tuple[str, Sequence[str]]] = {
    "model": ("preset", tuple(PRESETS)),
    "outer": ("algorithm", ("pier", "diloco", "noloco", "sync")),
}
"""The key of a section from which defaults of others follow, and its values."""


def run_toml(preset: str = "", name: str = "") -> str:
    """The text; what follows from the preset (or the algorithm) is shown in lines that begin with #."""
    given = {"model": {"preset": preset} if preset else {}, "run": {"name": name} if name else {}}
    return "\n".join([HEAD, *commented(RunConfig.model_validate(given), Notes(MEANINGS, DECIDES))])
