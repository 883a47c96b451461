"""Small models of every shape that the decoder has, with weights that hide no mistake."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout
from pier_node.trainer.model.decoder import Decoder

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "dim": 32,
    "layers": 3,
    "heads": 4,
    "kv_heads": 4,
    "ffn_dim": 48,
    "context": 24,
}

CONFIGS = {
    "llama": ModelSection(form="llama", **SHAPE),
    "llama-grouped": ModelSection(form="llama", **{**SHAPE, "kv_heads": 2}, rope_theta=500.0),
    "llama-untied": ModelSection(form="llama", **{**SHAPE, "kv_heads": 1}, tie_embeddings=False),
    "gpt2": ModelSection(form="gpt2", **SHAPE),
    "gpt2-untied": ModelSection(form="gpt2", **SHAPE, tie_embeddings=False),
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> ModelSection:
    return CONFIGS[request.param]


@pytest.fixture
def weights(config: ModelSection) -> Tensor:
    """Every element is random, norms and biases too: swapping two tensors anywhere changes the logits."""
    return torch.randn(Layout.of(config).length, generator=torch.Generator().manual_seed(1)) * 0.3


@pytest.fixture
def model(config: ModelSection, weights: Tensor) -> Decoder:
    decoder = Decoder(config)
    Layout.of(config).load(decoder, weights)
    return decoder


@pytest.fixture
def tokens(config: ModelSection) -> Tensor:
    """As long as the context: [2, 24]."""
    return torch.randint(0, config.vocab_size, (2, config.context), generator=torch.Generator().manual_seed(2))
