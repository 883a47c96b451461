from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pier_node.config.run import ModelSection
from pier_node.trainer.model.decoder import Decoder, Past

CPU = torch.device("cpu")


@pytest.mark.parametrize("cuts", [(24,), (1,) * 24, (5, 1, 1, 9, 8), (23, 1)])
@torch.no_grad()
def test_in_parts_a_text_gets_the_same_logits(model: Decoder, tokens: Tensor, cuts: tuple[int, ...]) -> None:
    text, past = tokens[:1], Past(model.config, CPU)
    parts = [model(part, past) for part in torch.split(text, list(cuts), dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(text), rtol=1e-4, atol=1e-4)
    assert past.length == 24


@torch.no_grad()
def test_a_cleared_past_knows_nothing(model: Decoder, tokens: Tensor) -> None:
    past = Past(model.config, CPU)
    model(tokens[:1, :10], past)
    past.clear()
    torch.testing.assert_close(model(tokens[:1, 3:9], past), model(tokens[:1, 3:9]), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_more_than_the_context_is_refused(model: Decoder, tokens: Tensor) -> None:
    past = Past(model.config, CPU)
    model(tokens[:1], past)
    with pytest.raises(ValueError, match="25 tokens do not fit into a context of 24"):
        model(tokens[:1, :1], past)


@torch.no_grad()
def test_ranges_of_blocks_have_pasts_of_their_own(config: ModelSection, model: Decoder, tokens: Tensor) -> None:
    first, last = Decoder(config, range(2)), Decoder(config, range(2, 3))
    for part in (first, last):
        part.load_state_dict(model.state_dict(), strict=False)
    pasts = Past(config, CPU, range(2)), Past(config, CPU, range(2, 3))
    got = [last(first(part, pasts[0]), pasts[1]) for part in (tokens[:1, :7], tokens[:1, 7:8])]
    torch.testing.assert_close(torch.cat(got, dim=1), model(tokens[:1, :8]), rtol=1e-4, atol=1e-4)
