"""torchtitan's trainer across sites: its Llama 3, its optimizer and its loop as they are.

It needs torchtitan 0.2.2, and triton, which PyTorch's CPU build does not bring: `pip install torchtitan==0.2.2 triton`.

First site:    torchrun --nproc-per-node 8 examples/torchtitan_trainer.py --data site-a
Other sites:   python examples/torchtitan_trainer.py --data site-b --peers HOST:PORT --token-file run.token

torchtitan expects an accelerator. Without one, `on_a_cpu` answers what it asks of it, and it trains on the CPU with one
rank, without torch.compile. With two ranks its FSDP2 wants to reduce gradients in a way that gloo lacks.
"""

import dataclasses
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from common import CONTEXT, membership, options, rows

import pier

BATCH = 8
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


def on_a_cpu() -> None:
    """Have torchtitan find a device where there is none but the CPU. Before it is imported: it asks only once."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda *_: "CPU"
    torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 40)
    torch.cpu.memory_stats = lambda *_: {}
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
    torch.cpu.current_device = lambda: 0


class Text:
    """A data loader of torchtitan over the text of all examples, of which this rank sees its own batches."""

    def __init__(self, dp_rank: int, **_: Any) -> None:
        self.rows, self.generator = rows(), torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            batch = self.rows[torch.randint(len(self.rows), (BATCH,), generator=self.generator)]
            yield {"input": batch[:, :-1].contiguous()}, batch[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: an example keeps no place in its text."""
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        """Nothing to load."""


def main() -> None:
    """Train until the run is over."""
    given = options(__doc__, steps=40)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, str(value))  # without torchrun: one rank
    os.environ.setdefault("MASTER_PORT", "0")
    if not torch.cuda.is_available():
        on_a_cpu()
    from torchtitan.config import JobConfig
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
    from torchtitan.train import Trainer

    spec = dataclasses.replace(get_train_spec("llama3"), build_tokenizer_fn=None, build_dataloader_fn=Text)
    register_train_spec("example", spec)
    job = JobConfig()
    job.model.name, job.model.flavor = "example", "debugmodel"
    job.training.steps, job.training.local_batch_size, job.training.seq_len = given.steps, BATCH, CONTEXT
    job.checkpoint.enable = False
    trainer = Trainer(job)
    (model,), (optimizer,) = trainer.model_parts, trainer.optimizers.optimizers
    ranks = dist.get_world_size()
    with pier.join(model, optimizer, step_tokens=ranks * BATCH * CONTEXT, **membership(given)) as site:
        trainer.train()
    if site.finished and dist.get_rank() == 0:
        print("the run is over")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
