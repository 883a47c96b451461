"""FSDP2 and tensor parallelism inside a site, Pier between sites. Other sites may do otherwise.

First site:    torchrun --nproc-per-node 4 examples/fsdp_tp.py --data site-a
Other sites:   torchrun --nproc-per-node 2 examples/fsdp_tp.py --data site-b --peers HOST:PORT --token-file run.token
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import CONTEXT, membership, options, rows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pier

BATCH = 8


def main() -> None:
    """Train until the run is over."""
    given = options(__doc__, steps=40)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 256))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    mesh = init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    replica = mesh["data"].get_local_rank()  # ranks that hold parts of one replica see the same batch
    with pier.join(model, optimizer, step_tokens=2 * BATCH * CONTEXT, **membership(given)) as site:
        text = rows()[site.slot :: site.slots].to(device)
        generator = torch.Generator().manual_seed(replica)
        while True:
            batch = text[torch.randint(len(text), (BATCH,), generator=generator)]
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    if site.finished and dist.get_rank() == 0:
        print("the run is over")


if __name__ == "__main__":
    main()
