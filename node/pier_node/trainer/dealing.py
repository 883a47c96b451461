"""Muon's matrices, dealt among the workers of a site: each orthogonalises its share, and all get what comes of it.

As in Dion's implementation of Muon (arXiv 2504.05295), a worker gets the whole update of its matrices from those that
have the parts, and sends everyone their part of the result: however the workers share the model, every number travels
twice at most. With ddp every worker has all updates, and only results travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pier_node.engine.parameters import Part
from pier_node.outer.inner_optimizer import Named, Orthogonal, cost


class Dealt(Orthogonal):
    """Orthogonalises matrices together with all workers of the site, which must all do the same.

    Args:
        parts: what this worker holds of each parameter.
        shapes: of the whole parameters, by name.
    """

    def __init__(self, parts: Sequence[Part], shapes: dict[str, torch.Size]) -> None:
        super().__init__()
        self.ranks, self._own, self._shapes = dist.get_world_size(), dist.get_rank(), shapes
        told: list[Sequence[Part]] = [()] * self.ranks
        dist.all_gather_object(told, parts)
        self._parts = [{part.name: part for part in each} for each in told]

    def __call__(self, updates: Named) -> Named:
        """This worker's parts of the results, from its parts of the updates."""
        owners, like = self._owners(updates), next(iter(updates.values()))
        wire = like.new_empty(0, dtype=torch.bfloat16 if like.is_cuda else like.dtype)  # as they are orthogonalised
        mine = [name for name in updates if owners[name] == self._own]
        whole = {name: wire.new_empty(self._shapes[name]) for name in mine}
        givers = {name: self._givers(name, owner) for name, owner in owners.items()}
        _exchange(
            [[updates[it] for it in updates if owners[it] == to and self._own in givers[it]] for to in self._all],
            [[self._place(whole[it], rank, it) for it in mine if rank in givers[it]] for rank in self._all],
            wire,
        )
        made = super().__call__(whole)
        results = {name: torch.empty_like(update) for name, update in updates.items()}
        _exchange(
            [[self._place(made[it], to, it) for it in mine] for to in self._all],
            [[results[it] for it in updates if owners[it] == rank] for rank in self._all],
            wire,
        )
        return results

    @property
    def _all(self) -> range:
        return range(self.ranks)

    def _owners(self, names: Iterable[str]) -> dict[str, int]:
        """Who orthogonalises which matrix: the dearest first, each by the worker that has the least to do."""
        costs, owners = [0] * self.ranks, dict[str, int]()
        for name in sorted(names, key=lambda it: cost(self._shapes[it]), reverse=True):
            owners[name] = min(self._all, key=lambda rank: costs[rank])
            costs[owners[name]] += cost(self._shapes[name])
        return owners

    def _givers(self, name: str, owner: int) -> set[int]:
        """Who gives the owner each part of a matrix: the owner itself what it has, and else the first that has it."""
        first: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        for rank in (owner, *self._all):
            part = self._parts[rank][name]
            first.setdefault((part.starts, part.sizes), rank)
        return set(first.values())

    def _place(self, whole: Tensor, rank: int, name: str) -> Tensor:
        """What a worker holds of a matrix."""
        part = self._parts[rank][name]
        return whole[tuple(slice(start, start + size) for start, size in zip(part.starts, part.sizes))]


def _exchange(given: list[list[Tensor]], wanted: list[list[Tensor]], wire: Tensor) -> None:
    """Send tensors to each worker, and fill others with what each sends. They travel in the type of `wire`."""
    out = torch.cat([wire, *(it.flatten().to(wire.dtype) for tensors in given for it in tensors)])
    received, sent = ([sum(it.numel() for it in tensors) for tensors in each] for each in (wanted, given))
    arrived = wire.new_empty(sum(received))
    dist.all_to_all_single(arrived, out, received, sent)
    places = [it for tensors in wanted for it in tensors]
    for place, values in zip(places, torch.split(arrived, [it.numel() for it in places])):
        place.copy_(values.view(place.shape))
