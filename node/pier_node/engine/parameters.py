"""The parameters of a program's model: which of them a run shares, and their way in and out of flat vectors.

Every rank copies its own part between its device and a shared vector of the host, parameter by parameter, so that no
device ever holds a second copy of the model. Sharded parameters (DTensor: FSDP2, tensor parallelism) move slice by
slice: nothing is gathered.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from pier_node.base.errors import PierError
from pier_node.base.shared import Vector, attach
from pier_node.base.toml import validated
from pier_node.config.program import ProgramSection, described
from pier_node.engine import staging
from pier_node.outer.layout import Layout

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What torch.compile, FSDP and activation checkpointing put into the names of parameters."""


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a run shares, by their names without wrappers; tied ones count once.

    Raises:
        PierError: no parameter requires a gradient, two have one name, or one has nothing that a run can share.
    """
    replicated = _replicated(model)
    found: dict[str, nn.Parameter] = {}
    for full, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = _bare(full, replicated)
        if name in found:
            raise PierError(f"two parameters of the model are called {name}", "Rename the module of one of them.")
        if isinstance(parameter, UninitializedParameter):
            raise PierError(f"parameter {name} of the model has no shape yet", "Call the model once before pier.join.")
        if parameter.is_complex():
            raise PierError(
                f"parameter {name} of the model is complex, and weights travel as fp32",
                "Make a real parameter of it (torch.view_as_real), and the complex one in `forward`.",
            )
        found[name] = parameter
    if not found:
        raise PierError("the model has no parameter that requires a gradient", "There is nothing to share with sites.")
    return found


def _replicated(model: nn.Module) -> set[str]:
    """The names that DistributedDataParallel and the like give to what they wrap. Raises PierError."""
    names = set[str]()
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | DataParallel):
            names.add(f"{name}.module".lstrip("."))
        if type(module).__name__ == "FullyShardedDataParallel" and module.sharding_strategy.name != "NO_SHARD":
            raise PierError(
                "the model is sharded by FullyShardedDataParallel, whose shards do not say what they are of",
                "Shard it by torch.distributed.fsdp.fully_shard (FSDP2).",
            )
    return names


def _bare(full: str, replicated: Collection[str]) -> str:
    """A parameter's name without what wrappers put into it."""
    parts = full.split(".")
    paths = accumulate(parts, lambda path, part: f"{path}.{part}")
    return ".".join(part for part, path in zip(parts, paths) if part not in WRAPPERS and path not in replicated)


def describe(model: nn.Module, step_tokens: int) -> str:
    """The section [program] for the run.toml of a coordinator, which never sees the model that its sites train.

    Args:
        model: as `pier.join` gets it, or before it is wrapped.
        step_tokens: tokens that a site trains on in one inner step, at most.

    Raises:
        PierError: the model trains nothing, or a run cannot describe it.
    """
    tables = {"step_tokens": step_tokens, "tensors": Vectors(model, rank=0).tensors}
    section = validated(tables, ProgramSection, "the model's description")
    tensors = "".join(f"    {json.dumps(tensor, ensure_ascii=False)},\n" for tensor in section.tensors)
    return f"[program]\nstep_tokens = {section.step_tokens}\ntensors = [\n{tensors}]\n"


@dataclass(frozen=True)
class Part:
    """What a rank holds of a parameter: in each dimension `sizes` elements, from `starts` on.

    Attributes:
        first: it is the first of the ranks that hold this, and publishes it.
    """

    name: str
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    first: bool


class Vectors:
    """A model's way in and out of flat vectors of fp32.

    Args:
        rank: of this process among those that share the model.

    Attributes:
        parameters: those that are shared, by name.
        tensors: name and shape of each shared parameter, as [program] of run.toml lists them.
        parts: what this rank holds of each of them.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._model, self.parameters = model, trained(model)
        shapes = [(name, tuple(parameter.shape)) for name, parameter in self.parameters.items()]
        self.tensors, self._layout = described(shapes), Layout.laid(shapes)
        self.parts = [_part(name, parameter.data, rank) for name, parameter in self.parameters.items()]

    @property
    def length(self) -> int:
        """Elements of the whole model, however it is sharded."""
        return self._layout.length

    @property
    def device(self) -> torch.device:
        """Where this rank has its part."""
        return next(iter(self.parameters.values())).device

    def check(self) -> None:
        """See that the model still has these parameters, and trains no others. Raises PierError."""
        if any(map(is_sharded, self.parameters.values())):
            from torch.distributed.fsdp import FSDPModule

            for module in self._model.modules():
                if isinstance(module, FSDPModule):  # after a computation it may still have others, which are whole
                    module.reshard()
        own = {id(parameter) for parameter in self.parameters.values()}
        here = dict(self._model.named_parameters())
        kept = {id(parameter) for parameter in here.values()}
        for name, parameter in self.parameters.items():
            if id(parameter) not in kept:
                raise PierError(
                    f"the model has another parameter {name} than at pier.join, which no other site gets",
                    "Load, wrap and convert the model before pier.join; later change its weights only in place.",
                )
        if new := [name for name, parameter in here.items() if parameter.requires_grad and id(parameter) not in own]:
            raise PierError(
                f"the model trains {new[0]}, which it did not at pier.join, so no other site gets it",
                "Freeze after pier.join what is to be trained later; or give pier.join only the part that sites share.",
            )

    def take(self, vector: Vector, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Take this rank's part from a vector, shape [length].

        Args:
            tensors: what to fill; None: the weights. Each is named, shaped and sharded like a parameter: an optimizer's
                moments, gradients.
        """
        with torch.no_grad():
            staging.take((self.local(part, tensors), place) for part, place in self.places(vector, self.parts))

    def store(self, path: str) -> None:
        """Write this rank's part of the weights to a shared vector, unless a lower rank has the same."""
        self.put(attach(path, self.length))

    def put(self, vector: Vector, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Write this rank's part of the weights, or of such `tensors`, to a vector, unless a lower rank has the same.

        Places of which `tensors` has nothing stay as they are.
        """
        parts = [part for part in self.parts if part.first and (tensors is None or part.name in tensors)]
        staging.put((self.local(part, tensors), place) for part, place in self.places(vector, parts))

    def local(self, part: Part, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        """This rank's tensor of a part, shape `sizes`, wherever and in whatever type it is."""
        return local((self.parameters if tensors is None else tensors)[part.name].detach())

    def places(self, weights: Vector, parts: Iterable[Part]) -> Iterator[tuple[Part, Tensor]]:
        """Parts, of any rank, and their places in a vector, shape [length]."""
        views = self._layout.views(torch.from_numpy(weights))
        for part in parts:
            place = views[part.name]
            for dimension, (start, size) in enumerate(zip(part.starts, part.sizes)):
                place = place.narrow(dimension, start, size)
            yield part, place


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether this is a DTensor. Asking does not load DTensor, which takes a second: whoever has one has loaded it."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, which may be a DTensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def _part(name: str, data: Tensor, rank: int) -> Part:
    if not is_sharded(data):
        return Part(name, (0,) * data.dim(), tuple(data.shape), first=rank == 0)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, starts = compute_local_shape_and_global_offset(data.shape, data.device_mesh, data.placements)
    starts = tuple(start if size else 0 for start, size in zip(starts, sizes))
    place = tuple(data.device_mesh.get_coordinate() or ())
    first = all(index == 0 for index, kind in zip(place, data.placements) if kind.is_replicate())
    return Part(name, starts, tuple(sizes), first)
