"""How the workers of a site share the model: the choice of a site, which is no part of the run.

ddp: every worker has the whole model. fsdp: each has an equal part of every tensor, which travel to all while they
compute a block (ZeRO-3, arXiv 1910.02054). hsdp: two copies of the model, each shared among half of the workers, as for
a machine with two sockets. `tensor` workers compute each matrix together (Megatron, arXiv 1909.08053; with the residual
stream divided by positions, arXiv 2205.05198). trainer/sharding.py does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pier_node.base.errors import PierError

if TYPE_CHECKING:  # the command line, which imports this, starts without it
    from pier_node.config.run import RunConfig

Mode = Literal["auto", "ddp", "fsdp", "hsdp"]
Checkpointing = Literal["none", "selective", "full"]
COPIES = 2
"""Copies of the model with hsdp."""


@dataclass(frozen=True)
class Parallel:
    """How a site spreads the model over its workers.

    Attributes:
        mode: see above; auto: chosen by the memory of the devices.
        tensor: number of workers that compute each matrix together.
        checkpointing: what a block keeps for its backward pass: all activations, the products of its matrices, or only
            its input, from which it computes the others again.
    """

    mode: Mode = "auto"
    tensor: int = 1
    checkpointing: Checkpointing = "none"

    def parts(self, workers: int) -> int:
        """Into how many parts so many workers split the model."""
        shares = workers // self.tensor
        return self.tensor * {"fsdp": shares, "hsdp": max(1, shares // COPIES)}.get(self.mode, 1)

    def shards(self, workers: int) -> bool:
        """Whether any of so many workers has only a part of the model."""
        return self.tensor > 1 or (self.mode != "ddp" and workers > 1)

    def check(self, config: RunConfig, workers: int) -> None:
        """Refuse what these workers cannot do with this model. Raises PierError."""
        model, tensor = config.model, self.tensor
        if workers % tensor:
            raise PierError(
                f"{workers} worker(s) cannot form groups of --tensor {tensor}",
                "Start this node with --workers that are a multiple of --tensor.",
            )
        if tensor > 1 and model.transformers:
            raise PierError(
                f"--tensor {tensor} is for Pier's own decoder, and transformers builds this run's model",
                "Start this node without --tensor; --parallel fsdp shares a large model among workers.",
            )
        sizes = {name: getattr(model, name) for name in ("heads", "kv_heads", "ffn_dim", "context")}
        if odd := [f"{name} = {size}" for name, size in sizes.items() if size % tensor]:
            raise PierError(
                f"--tensor {tensor} does not divide the model's {', '.join(odd)}",
                "Start this node with a --tensor that divides them, or without it.",
            )
        shares = workers // tensor
        if self.mode == "ddp" and tensor > 1 and shares > 1:
            raise PierError(
                f"--parallel ddp cannot have {shares} groups of --tensor {tensor}",
                "Start this node with --parallel fsdp or hsdp.",
            )
        if self.mode == "hsdp" and shares % COPIES:
            raise PierError(
                f"--parallel hsdp needs {COPIES} equal parts, but {workers} worker(s) with --tensor {tensor} share the "
                f"batch {shares} ways",
                "Start this node with --parallel fsdp.",
            )


AUTO, DDP = Parallel(), Parallel("ddp")
