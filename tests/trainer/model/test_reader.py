from __future__ import annotations

import torch
from torch import Tensor

from pier_node.experts.serving.mixture_decoder import Reader
from pier_node.trainer.model.decoder import Decoder


@torch.no_grad()
def predicted(model: Decoder, tokens: list[int]) -> Tensor:
    """log p of what follows each token, [tokens, vocab], in one forward pass."""
    return torch.log_softmax(model(torch.tensor([tokens]))[0], dim=-1)


def test_what_it_gives_is_what_one_forward_pass_gives(model: Decoder, tokens: Tensor) -> None:
    text, reader = tokens[0].tolist(), Reader()
    given = torch.cat([reader.read(model, text[:5]), reader.read(model, text[5:6]), reader.read(model, text[6:])])
    logs = predicted(model, text)
    assert given[0] == 0
    torch.testing.assert_close(given[1:], logs[:-1].gather(1, tokens[0, 1:, None])[:, 0], rtol=1e-4, atol=1e-4)
    assert reader.next is not None
    torch.testing.assert_close(reader.next, logs[-1], rtol=1e-4, atol=1e-4)


def test_a_text_longer_than_the_context_is_predicted_from_its_newer_half(model: Decoder, tokens: Tensor) -> None:
    text, reader = tokens.flatten().tolist(), Reader()
    reader.read(model, text[:24])
    given = reader.read(model, text[24:])
    first = predicted(model, text[:24])[-1, text[24]]
    later = predicted(model, text[12:36])  # tokens 12-23 are read again when the window is full
    torch.testing.assert_close(given[0], first, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(given[5], later[16, text[29]], rtol=1e-4, atol=1e-4)
    assert reader.next is not None
    torch.testing.assert_close(reader.next, predicted(model, text[24:48])[-1], rtol=1e-4, atol=1e-4)


def test_one_by_one_a_long_text_gets_the_same(model: Decoder, tokens: Tensor) -> None:
    text = [*tokens.flatten().tolist(), 1, 2, 3]
    together, alone = Reader(), Reader()
    given = torch.cat([alone.read(model, [token]) for token in text])
    torch.testing.assert_close(given, together.read(model, text), rtol=1e-4, atol=1e-4)


def test_no_tokens_change_nothing(model: Decoder) -> None:
    reader = Reader()
    assert len(reader.read(model, [])) == 0
    assert reader.next is None
