from __future__ import annotations

import pytest

from pier_node.config.run import ModelSection
from pier_node.trainer.model.cost import sent_bytes, training_bytes


@pytest.mark.parametrize(("width", "sent", "state"), [(2304, 577, 4.6), (3072, 620, 5.0), (3840, 662, 5.3)])
def test_hdee_small_close(width: int, sent: int, state: float) -> None:
    """spec/hdee.md section 5.1: an expert in bf16, its state, and the logits of a sequence."""
    sizes = {"dim": 768, "layers": 12, "heads": 12, "kv_heads": 12, "ffn_dim": width, "context": 1024}
    model = ModelSection.model_validate({**sizes, "vocab_size": 128_002, "tie_embeddings": False})
    assert round(sent_bytes(model) / 1e6) == sent
    logits = training_bytes(model, 43) - training_bytes(model, 1)
    assert logits == 42 * 1024 * 128_002 * (2 + 4), "11.0 and 22.0 GB"
    assert (training_bytes(model) - logits / 42) / 1e9 == pytest.approx(state, abs=0.05)
