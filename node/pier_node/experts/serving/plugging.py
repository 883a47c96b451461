"""Unplugs and plugs experts of an ensemble while it answers.

An expert that is unplugged answers no request from then on, and leaves the answers that are being made at their next
token. With decay, bayes and uniform the weights of the others are then what they would be had it never been there: the
weight of each is a product of its own prior and its own probabilities, and normalising removes what all have in common.
With fixed-share they are not, because what an expert loses at each token is shared among the others. There, an answer
that is being made continues with the weights renormalised, and the next request has the right ones.

Plugging reads ensemble.json again, so it takes up experts that were added or trained again since the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pier_node.base.errors import PierError
from pier_node.experts.serving.generation import Asking
from pier_node.experts.serving.models import Expert
from pier_node.experts.serving.request import Refusal
from pier_node.experts.serving.tokenizer import ModelTokenizer

Shelf = Callable[[], tuple[list[Expert], ModelTokenizer]]
"""Reads the ensemble's folder. Raises PierError."""


class Plugs:
    """The experts of an ensemble by name, each plugged, unplugged or lost."""

    def __init__(self, asking: Asking, shelf: Shelf) -> None:
        self._asking, self._pool, self._shelf = asking, asking.pool, shelf
        self._turn = asyncio.Lock()

    def told(self) -> list[dict[str, Any]]:
        """Each expert: its name, its domains and its state."""
        found = []
        for name, index in self._known().items():
            state = "lost" if index in self._pool.lost else "plugged"
            state = "unplugged" if index in self._pool.unplugged else state
            found.append({"id": name, "domains": [*self._asking.experts[index].domains], "state": state})
        return found

    async def unplug(self, name: str) -> None:
        """Let an expert answer no more. Raises Refusal: there is none of that name, or it is the only one."""
        async with self._turn:
            index = self._known().get(name)
            if index is None:
                raise self._unknown(name)
            if self._pool.alive == [index]:
                raise Refusal(409, f"{name} is the only expert that answers; plug another one first", "last_expert")
            await self._asking.compute(self._pool.unplug, index)

    async def plug(self, name: str) -> None:
        """Let an expert answer from the next request on.

        Raises:
            Refusal: ensemble.json has none of that name, its files cannot be read, it has another tokenizer or a domain
                of another expert that answers, or the memory is too small.
        """
        async with self._turn:
            try:
                experts, tokenizer = await asyncio.to_thread(self._shelf)
            except PierError as error:
                raise Refusal(409, str(error), "not_readable") from error
            new = next((expert for expert in experts if expert.name == name), None)
            if new is None:
                raise self._unknown(name)
            self._check(new, tokenizer)
            try:
                await self._asking.compute(self._asking.plug, new, self._known().get(name))
            except PierError as error:
                raise Refusal(409, str(error), "no_room") from error

    def _check(self, new: Expert, tokenizer: ModelTokenizer) -> None:
        if not self._asking.speaks(tokenizer, new.vocab_size):
            raise Refusal(409, f"{new.name} has another tokenizer than the ensemble that is served", "unlike_tokenizer")
        for index in self._pool.alive:
            other = self._asking.experts[index]
            if other.name != new.name and {*other.domains} & {*new.domains}:
                raise Refusal(409, f"{other.name} answers for a domain of {new.name}; unplug it first", "same_domain")

    def _known(self) -> dict[str, int]:
        """The index of each expert; of experts with one name, that of the last one that was plugged."""
        return {expert.name: index for index, expert in enumerate(self._asking.experts)}

    def _unknown(self, name: str) -> Refusal:
        known = ", ".join(self._known())
        return Refusal(404, f"there is no expert {name[:64]!a}; there are: {known}", "expert_not_found")
