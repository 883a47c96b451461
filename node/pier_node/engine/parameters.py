"""The parameters of a program's model: which of them a run shares, and their way in and out of flat vectors.

Every rank copies its own part between its device and a shared vector of the host, parameter by parameter, so that no
device ever holds a second copy of the model. Sharded parameters (DTensor: FSDP2, tensor parallelism) move slice by
slice: nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pier_node.base.errors import PierError
from pier_node.base.shared import Vector, attach
from pier_node.config.program import described
from pier_node.outer.layout import Layout

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What torch.compile, FSDP and activation checkpointing put into the names of parameters."""


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a run shares, by their names without wrappers; tied ones count once.

    Raises:
        PierError: no parameter requires a gradient, or two have one name.
    """
    while isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    found: dict[str, nn.Parameter] = {}
    for full, parameter in model.named_parameters():
        name = ".".join(part for part in full.split(".") if part not in WRAPPERS)
        if not parameter.requires_grad:
            continue
        if name in found:
            raise PierError(f"two parameters of the model are called {name}", "Rename the module of one of them.")
        found[name] = parameter
    if not found:
        raise PierError("the model has no parameter that requires a gradient", "There is nothing to share with sites.")
    return found


class Vectors:
    """A model's way in and out of flat vectors of fp32.

    Args:
        rank: of this process among those that share the model.

    Attributes:
        tensors: name and shape of each shared parameter, as [program] of run.toml lists them.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._parameters, self._rank = trained(model), rank
        shapes = [(name, tuple(parameter.shape)) for name, parameter in self._parameters.items()]
        self.tensors, self._layout = described(shapes), Layout.laid(shapes)

    @property
    def length(self) -> int:
        """Elements of the whole model, however it is sharded."""
        return self._layout.length

    def load(self, path: str) -> None:
        """Take this rank's part of the weights from a shared vector."""
        self.take(attach(path, self.length))

    def take(self, weights: Vector) -> None:
        """Take this rank's part of the weights from a vector, shape [length]."""
        with torch.no_grad():
            for local, part, _ in self._parts(weights):
                local.copy_(part)

    def store(self, path: str) -> None:
        """Write this rank's part of the weights to a shared vector, unless a lower rank has the same."""
        for local, part, first in self._parts(attach(path, self.length)):
            if first:
                part.copy_(local.detach())

    def _parts(self, weights: Vector) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Each parameter's local tensor, its place in the vector, and whether this rank is the first that has it."""
        for name, part in self._layout.views(torch.from_numpy(weights)).items():
            data = self._parameters[name].data
            if not isinstance(data, DTensor):
                yield data, part, self._rank == 0
                continue
            shape, start = compute_local_shape_and_global_offset(data.shape, data.device_mesh, data.placements)
            for dimension, (size, begin) in enumerate(zip(shape, start)):
                part = part.narrow(dimension, begin if size else 0, size)
            place = tuple(data.device_mesh.get_coordinate() or ())
            first = all(index == 0 for index, kind in zip(place, data.placements) if kind.is_replicate())
            yield data.to_local(), part, first
