from __future__ import annotations

import subprocess
import sys

import pytest

from pier_node.config import ModelSection
from pier_node.model.count import parameter_count
from pier_node.model.layout import Layout

SMALL = {"layers": 2, "context": 32}
"""Presets of billions would not fit; their widths are what matters."""


def test_golden() -> None:
    # Embedding 256 * 32; a block 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32; the final norm 32.
    assert parameter_count(ModelSection(preset="llama-tiny")) == 8192 + 2 * 10_304 + 32
    assert parameter_count(ModelSection(preset="gpt2-small")) == 124_439_808
    assert parameter_count(ModelSection(preset="llama-7b")) == 6_738_415_616


@pytest.mark.parametrize("preset", ["llama-tiny", "llama-1m", "gpt2-1m", "gpt2-small"])
@pytest.mark.parametrize("tied", [True, False])
def test_it_is_that_of_the_model_itself(preset: str, tied: bool) -> None:
    config = ModelSection.model_validate({"preset": preset, "tie_embeddings": tied, **SMALL})
    assert parameter_count(config) == Layout.of(config).length


def test_grouped_heads_are_counted_once_a_group() -> None:
    config = ModelSection(dim=64, heads=8, kv_heads=2, ffn_dim=96, layers=3)
    assert parameter_count(config) == Layout.of(config).length


def test_torch_is_not_needed() -> None:
    script = "import sys, pier_node.model.count; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
