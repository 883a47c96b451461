"""One model follows one text, token by token, and says what may come next.

A decoder sees `context` tokens. When they are full, the older half is forgotten and the newer half is read again, so
that every token is predicted from context / 2 tokens at least, at twice the cost of a token at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pier_node.model.decoder import Decoder
from pier_node.model.past import Past


class Reader:
    """What a model has read. The model itself is given with every call: it may be out of memory between two.

    Attributes:
        next: log p of the token that comes next, fp32 [vocab] in host memory; None before the first one.
    """

    def __init__(self) -> None:
        self.next: Tensor | None = None
        self._past: Past | None = None
        self._tail: list[int] = []  # what a new window begins with

    @torch.no_grad()
    def read(self, model: Decoder, tokens: Sequence[int]) -> Tensor:
        """Go on by some tokens.

        Returns:
            log p of each of them given those before, fp32 [tokens]; 0 for the first of a text, which nothing predicts.
        """
        given, left = [], list(tokens)
        while left:
            room = self._make_room(model)
            part, left = left[:room], left[room:]
            given.append(self._follow(model, part))
        return torch.cat(given) if given else torch.empty(0)

    def _make_room(self, model: Decoder) -> int:
        """How many tokens fit."""
        context, device = model.config.context, next(model.parameters()).device
        if self._past is None:
            self._past = Past(model.config, device)
        if self._past.length == context:
            self._past.clear()
            if self._tail:
                model(torch.tensor([self._tail], device=device), self._past)
        return context - self._past.length

    def _follow(self, model: Decoder, part: list[int]) -> Tensor:
        inputs = torch.tensor([part], device=next(model.parameters()).device)
        logs = torch.log_softmax(model(inputs, self._past)[0].float(), dim=-1)  # [tokens, vocab]
        within = logs[:-1].gather(1, inputs[0, 1:, None])[:, 0].cpu()
        first = torch.zeros(1) if self.next is None else self.next[part[0]].reshape(1)
        self.next = logs[-1].cpu()
        keep = model.config.context // 2
        self._tail = [*self._tail, *part][-keep:] if keep else []
        return torch.cat([first, within])
