"""What a demo leaves behind: the trained model as safetensors, and a text that it wrote."""

from __future__ import annotations

from pathlib import Path

import torch

from pier_node.checkpoint import CheckpointStore
from pier_node.config import RunConfig
from pier_node.data.tokens import ByteTokenizer
from pier_node.errors import PierError
from pier_node.model.decoder import Decoder
from pier_node.model.export import export, import_weights
from pier_node.model.generate import generate
from pier_node.model.layout import Layout

PROMPT = "def "
LENGTH = 320
TEMPERATURE, TOP_K = 0.6, 40


def export_site(site: Path, config: RunConfig, folder: Path) -> Path:
    """Export the anchor of a site's newest checkpoint into `folder`. Raises PierError."""
    checkpoint = CheckpointStore(site / "checkpoints", config.hash()).newest()
    if checkpoint is None:
        raise PierError(f"{site} has no checkpoint to export", f"Look into {site}.log.")
    return export(config.model, torch.from_numpy(checkpoint.state.anchor), folder)


def sample(folder: Path, prompt: str = PROMPT, length: int = LENGTH) -> str:
    """The prompt and what an exported model goes on with, `length` bytes. Raises PierError."""
    config, weights = import_weights(folder)
    model = Decoder(config)
    Layout.of(config).load(model, weights)
    tokenizer = ByteTokenizer()
    start = tokenizer.encode(prompt).tolist()
    return tokenizer.decode(start + generate(model, start, length, TEMPERATURE, TOP_K))
