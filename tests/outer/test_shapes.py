from __future__ import annotations

import subprocess
import sys

import pytest

from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout, shapes
from pier_node.trainer.model.decoder import Decoder

SMALL = {"layers": 2, "context": 32}
"""Presets of billions would not fit; their widths are what matters."""


def test_golden() -> None:
    # Embedding 256 * 32; a block 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32; the final norm 32.
    assert Layout.of(ModelSection(preset="llama-tiny")).length == 8192 + 2 * 10_304 + 32
    assert dict(shapes(ModelSection(preset="llama-tiny")))["blocks.1.mlp.down.weight"] == (32, 64)


@pytest.mark.parametrize("preset", ["llama-tiny", "llama-1m", "gpt2-1m", "gpt2-small"])
@pytest.mark.parametrize("tied", [True, False])
def test_they_are_those_of_the_model_itself(preset: str, tied: bool) -> None:
    config = ModelSection.model_validate({"preset": preset, "tie_embeddings": tied, **SMALL})
    built = [(name, tuple(parameter.shape)) for name, parameter in Decoder(config).named_parameters()]
    assert list(shapes(config)) == built


def test_grouped_heads_have_keys_and_values_once_a_group() -> None:
    config = ModelSection(dim=64, heads=8, kv_heads=2, ffn_dim=96, layers=3)
    assert dict(shapes(config))["blocks.2.attention.key.weight"] == (16, 64)


@pytest.mark.parametrize(
    "module", ["pier_node.outer.layout", "pier_node.site.daemon", "pier_coordinator.runs.coordinator"]
)
def test_torch_is_not_needed(module: str) -> None:
    script = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
