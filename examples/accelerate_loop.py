"""A loop with Hugging Face's Accelerate, across sites: nothing of it changes; `with pier.join` counts the steps.

First site:    accelerate launch examples/accelerate_loop.py --data site-a
Other sites:   accelerate launch examples/accelerate_loop.py --data site-b --peers HOST:PORT --token-file run.token
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common import CONTEXT, membership, options, rows
from torch import nn
from torch.utils.data import DataLoader

import pier

BATCH = 8


def main() -> None:
    """Train until the run is over."""
    given = options(__doc__, steps=40)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    plain = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 256))
    loader = DataLoader(list(rows()), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), loader)
    with pier.join(model, optimizer, step_tokens=BATCH * CONTEXT, **membership(given)) as site:
        while True:
            for batch in loader:
                loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
    if site.finished:
        print("the run is over")


if __name__ == "__main__":
    main()
