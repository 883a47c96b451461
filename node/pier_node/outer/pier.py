"""Pier's outer step: Nesterov momentum on the mean pseudo-gradient Δ = φ − θ, and the momentum warmup before it.

Source: Fan and Zhang, arXiv 2511.17849. The steps work in place with NumPy, with one rounding per operation: no fused
multiply-add can make two processors disagree, so sites can compare digests of their results.
"""

from __future__ import annotations

import numpy as np

from pier_node.base.shared import Vector


def pseudo_gradient(anchor: Vector, weights: Vector, out: Vector) -> None:
    """Δ ← φ − θ, all of shape [parameters]."""
    np.subtract(anchor, weights, out=out)


def accumulate(momentum: Vector, delta: Vector, mu: float, out: Vector) -> None:
    """M' ← μ·M + Δ: a start accumulates momentum without changing the weights."""
    np.multiply(momentum, np.float32(mu), out=out)
    np.add(out, delta, out=out)


def outer_step(
    anchor: Vector, momentum: Vector, delta: Vector, mu: float, lr: float, anchor_out: Vector, momentum_out: Vector
) -> None:
    """M' ← μ·M + Δ; φ' ← φ − η·(Δ + μ·M'), as in `torch.optim.SGD(nesterov=True)`; shapes [parameters].

    No output may overlap an input, and `delta` is an input too.
    """
    accumulate(momentum, delta, mu, out=momentum_out)
    np.multiply(momentum_out, np.float32(mu), out=anchor_out)
    np.add(anchor_out, delta, out=anchor_out)
    np.multiply(anchor_out, np.float32(lr), out=anchor_out)
    np.subtract(anchor, anchor_out, out=anchor_out)
