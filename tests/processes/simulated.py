"""Training functions for pier.simulate."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


def train_and_log(steps: int) -> list[pier.State]:
    """How the run stood at the beginning of each round here. Logs two metrics before every step."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = {"inner": {"total_steps": steps, "eval_every": 0}, "outer": {"algorithm": "diloco", "inner_steps": 5}}
    site = pier.join(model, optimizer, step_tokens=8, config=config)
    states: list[pier.State] = []
    try:
        while True:
            if not states or site.state.round > states[-1].round:
                states.append(site.state)
            optimizer.zero_grad()
            loss = (model(torch.ones(8, 4)) - 1).square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            metrics: dict[str, Any] = {"own/loss": loss, "own/step": site.step_index, "stage": "warm"}
            site.log(metrics)
            time.sleep(0.02)
            site.step(loss=loss)
    except pier.StopTraining:
        site.close()
    return states


def train_alone(steps: int, joins: bool = True) -> list[float]:
    """The final weights; with Pier, if `joins`, at the only site of a run whose outer step is the identity."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1)
    identity = {"algorithm": "diloco", "inner_steps": 5, "lr": 1.0, "momentum": 0.0}
    config = {"inner": {"total_steps": steps, "eval_every": 0}, "outer": identity}
    with pier.join(model, optimizer, step_tokens=8, config=config) if joins else contextlib.nullcontext():
        for _ in range(steps):
            inputs = torch.randn(8, 4, generator=generator)
            optimizer.zero_grad()
            torch.autograd.backward((model(inputs) - inputs.sum(1, keepdim=True)).square().mean())
            optimizer.step()
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


def train_after_a_thread_has_joined() -> bool:
    """Whether the run was finished."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = {"inner": {"total_steps": 100, "eval_every": 0}, "outer": {"algorithm": "diloco", "inner_steps": 5}}
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(pier.join, model, optimizer, step_tokens=8, config=config)
    with joining.result() as site:
        while True:
            torch.autograd.backward((model(torch.ones(8, 4)) - 1).square().mean())
            optimizer.step()
    return site.finished


def weights() -> dict[str, torch.Tensor]:
    """Weights of a site that has ended by the time somebody looks at them."""
    return nn.Linear(4, 1).state_dict()
