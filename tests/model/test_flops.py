import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pier_node.config import ModelSection
from pier_node.model.decoder import Decoder
from pier_node.model.flops import flops_per_token


@pytest.mark.parametrize(
    ("preset", "flops"),
    [
        # 6 * (124 439 808 - 1024 * 768) + 12 * 12 * 768 * 1024
        ("gpt2-small", 855_166_464.0),
        # 6 * (6 738 415 616 - 32 000 * 4096) + 12 * 32 * 4096 * 4096
        ("llama-7b", 46_086_512_640.0),
    ],
)
def test_golden(preset: str, flops: float) -> None:
    assert flops_per_token(ModelSection(preset=preset)) == flops


def test_it_agrees_with_what_torch_counts_in_the_matrix_products(config: ModelSection) -> None:
    """Exactly, but for attention, which torch counts by kernel, and norms and biases, which are no products."""
    model = Decoder(config)
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.zeros(1, config.context, dtype=torch.long)).sum().backward()
    products = ("mm", "addmm", "bmm")
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op).split(".")[-1] in products)
    attention = 12 * config.layers * config.dim * config.context
    vectors = 6 * sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
    assert counted / config.context == flops_per_token(config) - attention - vectors
