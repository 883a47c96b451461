"""A peer of bench/chaos_torchft.py: torchft's DiLoCo with Pier's smallest model, which notes each round as a site does.

It runs in an interpreter that has torchft. It keeps what it committed on its disk, which torchft leaves to the program.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pier_node.config.run import ModelSection
from pier_node.rounds.folder import EVENTS_FILE
from pier_node.trainer.model.decoder import Decoder

BATCH = 2
CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Place:
    """Where a peer is, and what it is told: see main()."""

    folder: Path
    address: str
    lighthouse: str
    least: int
    timeout: timedelta
    steps: int
    pace: float


class Peer:
    """Its model and optimizers, and torchft's manager."""

    def __init__(self, place: Place) -> None:
        self._place = place
        torch.manual_seed(0)
        self.model = Decoder(ModelSection(preset="llama-tiny"))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=4e-4, weight_decay=0.1, betas=(0.9, 0.95))
        self.outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        distributed: Any = import_module("torch.distributed")
        torchft: Any = import_module("torchft")
        self._store = distributed.TCPStore(place.address, 0, is_master=True, wait_for_workers=False)
        self.manager: Any = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=place.timeout),
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=place.least,
            use_async_quorum=False,  # DiLoCo wants it so
            timeout=place.timeout,
            quorum_timeout=place.timeout,
            connect_timeout=place.timeout,
            rank=0,
            world_size=1,
            store_addr=place.address,
            store_port=self._store.port,
            lighthouse_addr=place.lighthouse,
            replica_id=place.folder.name,
            hostname=place.address,
        )
        self._resume()

    def train(self) -> None:
        """Train for ever."""
        text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
        context = self.model.config.context
        dice = torch.Generator().manual_seed(time.time_ns() % 2**31)
        seen = self.manager.current_step()
        local_sgd: Any = import_module("torchft.local_sgd")
        with local_sgd.DiLoCo(self.manager, [self.model], self.inner, self.outer, sync_every=self._place.steps):
            while True:
                over = time.monotonic() + self._place.pace
                starts = torch.randint(len(text) - context - 1, (BATCH,), generator=dice)
                rows = torch.stack([text[start : start + context + 1] for start in starts.tolist()])
                self.inner.zero_grad()
                logits: Tensor = self.model(rows[:, :-1])
                torch.autograd.backward(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
                self.inner.step()
                if self.manager.current_step() > seen:
                    seen = self.manager.current_step()
                    self._committed(seen, BATCH * context * self._place.steps)
                time.sleep(max(0.0, over - time.monotonic()))

    def _committed(self, step: int, tokens: int) -> None:
        """Keep the round, then tell of it."""
        content = {"user": self._state(), "outer": self.outer.state_dict(), "torchft": self.manager.state_dict()}
        path = self._place.folder / CHECKPOINT
        torch.save(content, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        event = {
            "round": step,
            "time": time.time(),
            "digest": digest.hexdigest(),
            "members": [""] * self.manager.num_participants(),
            "tokens_in_anchor": self.manager.batches_committed() * tokens,
        }
        with (self._place.folder / EVENTS_FILE).open("a") as file:
            file.write(json.dumps(event) + "\n")

    def _resume(self) -> None:
        path = self._place.folder / CHECKPOINT
        if path.exists():
            content = torch.load(path)
            self._load(content["user"])
            self.outer.load_state_dict(content["outer"])
            self.manager.load_state_dict(content["torchft"])

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "inner": self.inner.state_dict()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])


def main() -> None:
    """Take part until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--address", required=True, help="of this peer")
    parser.add_argument("--lighthouse", required=True, help="its URL")
    parser.add_argument("--least", type=int, required=True, help="min_replica_size")
    parser.add_argument("--timeout", type=float, required=True, help="seconds, of all that the manager waits for")
    parser.add_argument("--steps", type=int, required=True, help="between two averagings")
    parser.add_argument("--pace", type=float, required=True, help="seconds of a step")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    torch.set_num_threads(1)
    vars(socket)["gethostname"] = lambda: options.address  # the peers of this machine have one name
    place = Place(**{**vars(options), "timeout": timedelta(seconds=options.timeout)})
    print(f"{options.folder.name} starts", file=sys.stderr)
    Peer(place).train()


if __name__ == "__main__":
    main()
