"""Experts in memory, and as readers of one text that they follow together. A single model is one expert.

Experts are loaded when first asked; the least recently asked are evicted when memory is full. A request reserves all
its experts at once, and waits until they fit next to the experts that are in use. No request holds some experts while
it waits for more, so requests cannot deadlock.

A mixture of the experts predicts each token, and a lost expert is removed. This computes in the one compute thread (see
generation.py). Each expert reads the text token by token and predicts the next token. A decoder sees `context` tokens.
When they are full, the older half is dropped and the newer half is read again. So every token is predicted from at
least context / 2 tokens, at twice the cost per token at most.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pier_node.base.errors import PierError
from pier_node.base.tasks import Signal
from pier_node.base.units import amount
from pier_node.experts.mixture import Array, Mixture, Rule, mixed, normalised
from pier_node.experts.serving.models import Expert, LanguageModel

log = logging.getLogger(__name__)


class Lost(Exception):
    """An expert cannot be asked any more: its files are missing or damaged, or its output is not a number."""


class Pool:
    """Experts by index, of which as many are in memory as fit.

    Args:
        experts: those that can be asked at first.
        memory: bytes for weights; 0: no limit.

    Attributes:
        experts: all that there ever were.
        lost: the experts that cannot be asked any more.
        unplugged: the experts that shall not be asked.
    """

    def __init__(self, experts: Sequence[Expert], memory: int = 0) -> None:
        self.experts = [*experts]
        self.lost: set[int] = set()
        self.unplugged: set[int] = set()
        self._memory = memory
        self._models: OrderedDict[int, LanguageModel] = OrderedDict()  # the least recently asked first
        self._users: Counter[int] = Counter()
        self._changed = Signal()

    @property
    def alive(self) -> list[int]:
        """The experts that can be asked."""
        return [index for index in range(len(self.experts)) if index not in self.lost | self.unplugged]

    @property
    def missing(self) -> set[int]:
        """The experts that should be asked and cannot."""
        return self.lost - self.unplugged

    def check_room(self, most: int, plugged: Expert | None = None, place: int | None = None) -> None:
        """Raise PierError unless any `most` experts that can be asked fit together (0: all).

        Args:
            plugged: as if this one could be asked too, in place of the expert with the index `place`.
        """
        asked = [self.experts[index] for index in self.alive if index != place] + ([plugged] if plugged else [])
        sizes = sorted((expert.size for expert in asked), reverse=True)[: most or None]
        if self._memory and sum(sizes) > self._memory:
            raise PierError(
                f"--memory {amount(self._memory)} is too little: {len(sizes)} experts take {amount(sum(sizes))}",
                "Give more, or have fewer experts answer a request with --top-k.",
            )

    @asynccontextmanager
    async def reserved(self, wanted: Iterable[int]) -> AsyncIterator[None]:
        """Reserve memory for these experts until the end of the block; waits for it."""
        experts = {*wanted}
        await self._changed.until(lambda: self._fits(experts))
        self._users.update(experts)
        try:
            yield
        finally:
            self._users.subtract(experts)
            self._changed.notify()

    def model(self, index: int) -> LanguageModel:
        """The model of an expert whose memory is reserved. Always called from the same thread.

        Raises:
            Lost: it cannot be read; it is not tried again.
        """
        expert = self.experts[index]
        if index in self.lost | self.unplugged:
            raise Lost(expert.name)
        if index not in self._models:
            self._make_room(expert)
            try:
                self._models[index] = expert.load()
            except Exception as error:  # whatever is wrong with one expert, the others continue
                self.lose(index, error)
                raise Lost(expert.name) from error
            log.info("%s was read: %s", expert.name, amount(expert.size))
        self._models.move_to_end(index)
        return self._models[index]

    def lose(self, index: int, why: object) -> None:
        """Stop using an expert."""
        self.lost.add(index)
        self._models.pop(index, None)
        first = [*str(why).splitlines(), type(why).__name__][0]  # a MemoryError has no text
        log.warning("the expert of %s drops out: %s", self.experts[index].name, first)

    def unplug(self, index: int) -> None:
        """Do not ask an expert until it is plugged."""
        if index in self.unplugged:
            return
        self.unplugged.add(index)
        self._models.pop(index, None)
        log.info("the expert of %s was unplugged", self.experts[index].name)

    def plug(self, expert: Expert, index: int | None) -> None:
        """Ask an expert from now on; `index`: that of the expert whose place it takes, if there is one.

        If it is the same expert, it takes part again, and files that could not be read are tried again. Requests in
        work never meet an expert in place of another.
        """
        if index is None or self.experts[index] != expert:
            if index is not None:
                self.unplug(index)
            self.experts.append(expert)
        elif index in self.alive:
            return
        else:
            for gone in (self.lost, self.unplugged):
                gone.discard(index)
        log.info("the expert of %s was plugged", expert.name)

    @property
    def resident(self) -> list[int]:
        """The experts in memory, the least recently asked first."""
        return [*self._models]

    def _fits(self, experts: set[int]) -> bool:
        used = experts | {index for index, users in self._users.items() if users > 0}
        return not self._memory or sum(self.experts[index].size for index in used) <= self._memory

    def _make_room(self, expert: Expert) -> None:
        held = sum(self.experts[index].size for index in self._models)
        for index in self.resident:
            if not self._memory or held + expert.size <= self._memory:
                return
            if self._users[index] <= 0:
                del self._models[index]
                held -= self.experts[index].size
                log.info("the expert of %s makes room for that of %s", self.experts[index].name, expert.name)


class Reader:
    """What a model has read. The model itself is passed to every call, because it may be evicted between two calls.

    Attributes:
        next: log p of the next token, fp32 [vocab] in host memory; None before the first token.
    """

    def __init__(self) -> None:
        self.next: Tensor | None = None
        self._past: Any = None
        self._length = 0  # tokens in the past
        self._tail: list[int] = []  # the beginning of a new window

    @torch.no_grad()
    def read(self, model: LanguageModel, tokens: Sequence[int], rows: list[Tensor] | None = None) -> Tensor:
        """Read more tokens.

        Args:
            rows: gets the distributions that predicted the tokens, log p [some tokens, vocab] in each item; zeros for
                the first token of a text.

        Returns:
            log p of each token given the tokens before it, fp32 [tokens]; 0 for the first of a text, which nothing
            predicts.
        """
        given, left = [], list(tokens)
        while left:
            room = self._make_room(model)
            part, left = left[:room], left[room:]
            given.append(self._follow(model, part, rows))
        return torch.cat(given) if given else torch.empty(0)

    def _make_room(self, model: LanguageModel) -> int:
        """Make room for tokens. Returns how many fit."""
        if self._length >= model.context:
            self._past, self._length = None, len(self._tail)
            if self._tail:
                _, self._past = model.follow(self._tail, None)
        return model.context - self._length

    def _follow(self, model: LanguageModel, part: list[int], rows: list[Tensor] | None) -> Tensor:
        logits, self._past = model.follow(part, self._past)
        self._length += len(part)
        logs = torch.log_softmax(logits.float(), dim=-1)  # [tokens, vocab]
        within = logs[:-1].gather(1, torch.tensor(part[1:], device=logs.device)[:, None])[:, 0].cpu()
        first = torch.zeros(1) if self.next is None else self.next[part[0]].reshape(1)
        if rows is not None:
            before = torch.zeros(logs.shape[1]) if self.next is None else self.next
            rows.append(torch.cat([before[None], logs[:-1].cpu()]))
        self.next = logs[-1].cpu()
        keep = model.context // 2
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
        self.pool, self._expert, self._reader = pool, expert, Reader()

    def read(self, tokens: Sequence[int], rows: list[Tensor] | None = None) -> None:
        """Read more tokens; `rows` is as in `Reader.read`. Raises Lost."""
        given = self._reader.read(self.pool.model(self._expert), tokens, rows)
        if not (torch.isfinite(given).all() and torch.isfinite(self.next).all()):
            self.pool.lose(self._expert, "what it predicts is no number")
            raise Lost
        self.given.append(given.double().numpy())

    @property
    def next(self) -> Tensor:
        """log p of the next token, [vocab]."""
        assert self._reader.next is not None  # the prompt was read
        return self._reader.next


@dataclass(frozen=True)
class Scored:
    """What was predicted of a token of a prompt. The first token of a prompt has no meaning here.

    Attributes:
        log_prob: the mixture's log p.
        parts: each expert's share of the probability, by its index.
        top: the likeliest tokens and their log p, the likeliest first; empty if not requested.
    """

    log_prob: float
    parts: Mapping[int, float]
    top: Sequence[tuple[int, float]] = ()


class MixtureDecoder:
    """Experts that have all read the same prompt and continue together.

    Args:
        prior: of all experts of the pool, [experts].
        heard: the experts that take part, by index; all have read the prompt, or none has read anything.

    Attributes:
        experts: indices of the experts that take part now.
        prompt: what was predicted of each token of the prompt.
    """

    def __init__(self, rule: Rule, prior: Array, heard: Mapping[int, Heard]) -> None:
        if not heard:
            raise NoExperts
        self.experts = sorted(heard)
        self._heard = [heard[expert] for expert in self.experts]
        own = prior[self.experts]
        self._mixture = Mixture(rule, own / own.sum())
        self.prompt: list[Scored] = []
        if all(each.given for each in self._heard):
            given = np.stack([np.concatenate(each.given) for each in self._heard])  # [experts, tokens]
            weights = self._mixture.follow(given)
            self._note(mixed(weights, given), weights + given)

    def read(self, tokens: Sequence[int], best: int) -> None:
        """Read a part of the prompt, all experts together, and note the `best` likeliest tokens at each place.

        Raises:
            NoExperts: the last expert was lost.
        """
        every: list[Tensor] = []
        for expert, heard in list(zip(self.experts, self._heard)):
            rows: list[Tensor] = []
            try:
                heard.read(tokens, rows)
                every.append(torch.cat(rows))
            except Lost:
                self._drop(expert)
        logs = torch.stack(every).double()  # [experts, tokens, vocab]
        ids = torch.tensor(tokens)
        given = logs[:, torch.arange(len(ids)), ids].numpy()
        weights = self._mixture.follow(given)
        whole = torch.logsumexp(torch.from_numpy(weights)[..., None] + logs, dim=0)  # [tokens, vocab]
        scores, found = whole[torch.arange(len(ids)), ids].numpy(), whole.topk(min(best, whole.shape[1]))
        tops = [list(zip(*row)) for row in zip(found.indices.tolist(), found.values.tolist())]
        self._note(scores, weights + given, tops)

    def _note(self, scores: Array, joint: Array, tops: Sequence[Sequence[tuple[int, float]]] = ()) -> None:
        parts = np.exp(normalised(joint)).T.tolist()
        for at, score in enumerate(scores.tolist()):
            self.prompt.append(Scored(score, dict(zip(self.experts, parts[at])), tops[at] if tops else ()))

    def fork(self) -> MixtureDecoder:
        """The same experts at the same place, to continue the text in another way."""
        shared = [self.prompt, *(heard.pool for heard in self._heard)]
        return copy.deepcopy(self, memo={id(each): each for each in shared})

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
