"""A worker's place among those of its site, and how they find each other: on the loopback interface, through a file."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A worker that waits for another for so long gives up, and the site's workers are restarted."""


@dataclass(frozen=True)
class Place:
    """Which worker this is: rank of world, in the group's restart number `attempt`."""

    rank: int
    world: int
    attempt: int

    def join(self, device: torch.device, socket: str) -> None:
        """Make the process group of the site, with a file beside the daemon's socket as its store; alone: nothing."""
        if self.world == 1:
            return
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{socket}.group-{self.attempt}",
            rank=self.rank,
            world_size=self.world,
            timeout=COLLECTIVE_TIMEOUT,
        )
