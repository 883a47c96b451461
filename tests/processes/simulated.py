"""A training function for pier.simulate."""

from __future__ import annotations

import torch
from torch import nn

import pier


def train(steps: int, fails_at: int = -1) -> tuple[int, float]:
    """This site's slot, and the sum of the final weights."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = {"inner": {"total_steps": steps, "eval_every": 0}, "outer": {"algorithm": "diloco", "inner_steps": 5}}
    generator = torch.Generator().manual_seed(1)
    with pier.join(model, optimizer, step_tokens=8, config=config) as site:
        while True:
            inputs = torch.randn(8, 4, generator=generator)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            if site.slot == fails_at:
                raise RuntimeError("as the test wants it")
            optimizer.step()
    return site.slot, sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
