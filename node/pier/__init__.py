"""Pier in a training program: any PyTorch model and loop becomes a site of a run across the internet.

    import pier
    site = pier.join(model, optimizer, step_tokens=8192, config={"inner": {"total_steps": 10_000}})
    for batch in loader:
        loss = model(**batch).loss; loss.backward(); optimizer.step(); optimizer.zero_grad()
        site.step(tokens=batch["input_ids"].numel(), loss=loss)

docs/program.md is the tutorial, docs/engine.md the contract between program and daemon.
"""

from pier.checkpoint import load
from pier.simulation import simulate
from pier_node.base.errors import PierError
from pier_node.engine.client import Site, State, StopTraining
from pier_node.engine.join import join
from pier_node.engine.parameters import describe

__all__ = ["PierError", "Site", "State", "StopTraining", "describe", "join", "load", "simulate"]
