"""How hivemind's peers in a bench find each other, and form a group.

They use a DHT on loopback, whose first peer writes its address to a file.
"""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"


def join_dht(rank: int, peers_file: Path, gate: Any) -> Any:
    """A peer's part of a DHT, in a process of its own; `gate` is a barrier of all peers."""
    import torch
    from hivemind import DHT

    multiprocessing.set_start_method("fork", force=True)  # hivemind's own processes cannot be spawned
    torch.set_num_threads(1)
    if rank == 0:
        dht = DHT(start=True, host_maddrs=[f"/ip4/{HOST}/tcp/0"])
        peers_file.write_text("\n".join(str(address) for address in dht.get_visible_maddrs()))
    gate.wait()
    if rank:
        dht = DHT(start=True, initial_peers=peers_file.read_text().split(), host_maddrs=[f"/ip4/{HOST}/tcp/0"])
    return dht


def matched(averager: Any) -> Any:
    """A peer's next step, once its group stands: `allow_allreduce` begins the exchange."""
    from hivemind.averaging.control import AveragingStage

    control = averager.step(wait=False, require_trigger=True, timeout=120)
    while control.stage != AveragingStage.AWAITING_TRIGGER:
        time.sleep(0.01)
    return control
