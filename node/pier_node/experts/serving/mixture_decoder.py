"""Experts that follow one text together: their mixture predicts each token, and a lost expert is removed.

Everything here computes, and runs in the one compute thread (see queue.py). Each expert reads the text token by token
and predicts the next token. A decoder sees `context` tokens. When they are full, the older half is dropped and the
newer half is read again. So every token is predicted from at least context / 2 tokens, at twice the cost per token at
most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pier_node.experts.mixture import Array, Mixture, Rule, mixed, normalised
from pier_node.experts.serving.models import Lost, Pool
from pier_node.trainer.model.decoder import Decoder, Past


class Reader:
    """What a model has read. The model itself is passed to every call, because it may be evicted between two calls.

    Attributes:
        next: log p of the next token, fp32 [vocab] in host memory; None before the first token.
    """

    def __init__(self) -> None:
        self.next: Tensor | None = None
        self._past: Past | None = None
        self._tail: list[int] = []  # the beginning of a new window

    @torch.no_grad()
    def read(self, model: Decoder, tokens: Sequence[int]) -> Tensor:
        """Read more tokens.

        Returns:
            log p of each token given the tokens before it, fp32 [tokens]; 0 for the first of a text, which nothing
            predicts.
        """
        given, left = [], list(tokens)
        while left:
            room = self._make_room(model)
            part, left = left[:room], left[room:]
            given.append(self._follow(model, part))
        return torch.cat(given) if given else torch.empty(0)

    def _make_room(self, model: Decoder) -> int:
        """Make room for tokens. Returns how many fit."""
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


class NoExperts(Exception):
    """No expert is left that could answer."""


class Heard:
    """What one expert has read of a text.

    Attributes:
        given: log p of each token read, one array per call; 0 for the first token of a text.
    """

    def __init__(self, pool: Pool, expert: int) -> None:
        self.given: list[Array] = []
        self._pool, self._expert, self._reader = pool, expert, Reader()

    def read(self, tokens: Sequence[int]) -> None:
        """Read more tokens. Raises Lost."""
        given = self._reader.read(self._pool.model(self._expert), tokens)
        if not (torch.isfinite(given).all() and torch.isfinite(self.next).all()):
            self._pool.lose(self._expert, "what it predicts is no number")
            raise Lost
        self.given.append(given.double().numpy())

    @property
    def next(self) -> torch.Tensor:
        """log p of the next token, [vocab]."""
        assert self._reader.next is not None  # the prompt was read
        return self._reader.next


class MixtureDecoder:
    """Experts that have all read the same prompt and continue together.

    Args:
        prior: of all experts of the pool, [experts].
        heard: the experts that take part, by index; each has read the prompt.

    Attributes:
        experts: indices of the experts that take part now.
        prompt_scores: the mixture's log p of the prompt's tokens, [tokens]; the first value has no meaning.
        prompt_parts: each expert's share of these probabilities, [experts, tokens].
    """

    def __init__(self, rule: Rule, prior: Array, heard: Mapping[int, Heard]) -> None:
        if not heard:
            raise NoExperts
        self.experts = sorted(heard)
        self._heard = [heard[expert] for expert in self.experts]
        own = prior[self.experts]
        self._mixture = Mixture(rule, own / own.sum())
        given = np.stack([np.concatenate(each.given) for each in self._heard])  # [experts, tokens]
        weights = np.empty_like(given)
        for token in range(given.shape[1]):
            weights[:, token] = self._mixture.log_weights
            self._mixture.observe(given[:, token])
        self.prompt_scores = mixed(weights, given)
        self.prompt_parts = np.exp(normalised(weights + given))

    @property
    def posterior(self) -> Array:
        """Weights of the experts for the next token, [experts]."""
        return np.asarray(np.exp(self._mixture.log_weights))

    def predict(self) -> Array:
        """The mixture's log p of the next token, [vocab]."""
        every = torch.stack([heard.next for heard in self._heard]).double().numpy()  # [experts, vocab]
        return self._mixture.predict(every)

    def say(self, token: int, last: bool = False) -> dict[int, float]:
        """Advance by one token. Returns each expert's share of its probability, by expert.

        After the last token nothing can be predicted, and no expert reads it.

        Raises:
            NoExperts: the last expert was lost.
        """
        given = np.array([heard.next[token].item() for heard in self._heard])  # [experts]
        parts = np.exp(normalised(self._mixture.log_weights + given))
        said = {expert: float(part) for expert, part in zip(self.experts, parts)}
        self._mixture.observe(given)
        for expert, heard in [] if last else list(zip(self.experts, self._heard)):
            try:
                heard.read([token])
            except Lost:
                self._drop(expert)
        return said

    def _drop(self, expert: int) -> None:
        if len(self.experts) == 1:
            raise NoExperts
        at = self.experts.index(expert)
        self._mixture.drop(at)
        del self.experts[at], self._heard[at]


def likeliest(prior: Array, heard: Mapping[int, Heard], rule: Rule, most: int) -> list[int]:
    """The `most` experts that the prompt makes likeliest; among equals, the first ones."""
    speakers = MixtureDecoder(rule, prior, heard)
    order = np.argsort(-speakers.posterior, kind="stable")[:most]
    return sorted(speakers.experts[index] for index in order)
