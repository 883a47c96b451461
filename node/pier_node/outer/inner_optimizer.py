"""The step of `inner.optimizer` for every part of a site: on named tensors, or on flat vectors. Pure.

AdamW: Loshchilov and Hutter, arXiv 1711.05101. SGD is torch.optim.SGD's, with decoupled weight decay. Muon: Jordan et
al. 2024, as torch.optim.Muon has it. The momentum of each hidden matrix is orthogonalised, and scaled by 0.2 ·
√(max(rows, columns)), so that its root mean square is that of AdamW's steps and one learning rate serves both (Liu et
al., arXiv 2502.16982, section 2.2). All other parameters take AdamW's step.

Whatever the optimizer, its state is two vectors: AdamW's moments; or Muon's momentum (for hidden matrices) or SGD's in
the first vector, and zeros in the second.

In synchronous training every daemon takes the step itself, and all must get the same bits. On a CPU, PyTorch's fused
AdamW gives the same bits for separate tensors and for views of one flat vector, with any number of threads. A product
of matrices does not: its order of summation depends on the machine. So `step_vectors` orthogonalises on a grid on which
all sums are exact: see `_orthogonal_exactly`.

PyTorch's kernel is called as a function: creating a `torch.optim.Optimizer` imports the compiler, which costs every
process a second at its start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from pier_node.config.run import InnerSection
from pier_node.outer.layout import Layout, is_decayed, is_hidden_matrix
from pier_node.outer.schedule import learning_rate

EPSILON = 1e-8
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of Newton and Schulz's iteration by Jordan: σ ← aσ + bσ³ + cσ⁵ brings singular values near 1."""
ITERATIONS = 5
SMALLEST = 1e-7
"""A momentum of a smaller norm counts as having this norm."""
GRID = 2.0**24
BATCH = 1 << 24
"""Elements of the matrices that a GPU orthogonalises at once: enough to fill it, in 32 MB."""
CACHED = 1 << 18
"""As BATCH, on a CPU, where there is nothing to fill, and the matrices should stay in its cache."""
Named = Mapping[str, Tensor]


class Moments(NamedTuple):
    """The state of the optimizer: two tensors for each parameter, by its name, and the number of steps behind them."""

    first: Named
    second: Named
    steps: int


@torch.no_grad()
def take_step(
    parameters: Mapping[str, nn.Parameter],
    moments: Moments,
    step: int,
    config: InnerSection,
    orthogonal: Orthogonal | None = None,
) -> Tensor:
    """Clip the parameters' gradients and take a step, all in place. Only matrices have weight decay.

    Returns the norm of all gradients together before they were clipped, a scalar on their device.

    Args:
        parameters: by name, with their gradients in `grad`.
        moments: changed in place, but for their number of steps.
        step: index of this inner step in the whole run; it determines the learning rate.
        orthogonal: what orthogonalises Muon's matrices; None: this process, all of them.
    """
    if config.clip_norm:
        norm = _total(nn.utils.clip_grad_norm_(parameters.values(), config.clip_norm))
    else:
        norm = gradient_norm(parameters)
    if config.optimizer == "adamw":
        _adamw(parameters, moments, step, config)
    elif config.optimizer == "sgd":
        _sgd(parameters, moments.first, step, config)
    else:
        matrices = {name: it for name, it in parameters.items() if is_hidden_matrix(name, it.shape)}
        _muon(matrices, moments.first, step, config, orthogonal or Orthogonal())
        _adamw({name: it for name, it in parameters.items() if name not in matrices}, moments, step, config)
    return norm


def gradient_norm(parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """The norm of all gradients together, a scalar on their device."""
    return _total(nn.utils.get_total_norm([it.grad for it in parameters.values() if it.grad is not None]))


def _total(norm: Any) -> Tensor:
    """A norm of what all processes have: they sum it up together, if their parameters are DTensors."""
    total: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return total


def _adamw(parameters: Mapping[str, nn.Parameter], moments: Moments, step: int, config: InnerSection) -> None:
    for decayed, decay in ((True, config.weight_decay), (False, 0.0)):
        names = [name for name, it in parameters.items() if is_decayed(it.shape) is decayed and it.grad is not None]
        if not names:
            continue
        chosen = [_own(parameters[name]) for name in names]
        steps = torch.full((len(names),), float(moments.steps), device=chosen[0].device)
        adamw(
            chosen,
            [_own(parameters[name].grad) for name in names],
            [moments.first[name] for name in names],
            [moments.second[name] for name in names],
            [],
            list(steps.unbind()),
            fused=True,
            amsgrad=False,
            beta1=config.beta1,
            beta2=config.beta2,
            lr=learning_rate(step, config),
            weight_decay=decay,
            eps=EPSILON,
            maximize=False,
        )


def _sgd(parameters: Mapping[str, nn.Parameter], momenta: Named, step: int, config: InnerSection) -> None:
    rate = learning_rate(step, config)
    for name, parameter in _with_gradients(parameters):
        momenta[name].mul_(config.momentum).add_(_own(parameter.grad))
        if is_decayed(parameter.shape):
            _own(parameter).mul_(1 - rate * config.weight_decay)
        _own(parameter).sub_(momenta[name] * rate)


class Orthogonal:
    """Orthogonalises matrices, here: all of them.

    Args:
        exact: with the same bits on every CPU.

    Attributes:
        ranks: number of processes that share the work.
    """

    ranks = 1

    def __init__(self, exact: bool = False) -> None:
        self._one_shape = _orthogonal_exactly if exact else _orthogonal

    def __call__(self, updates: Named) -> Named:
        """About U·Vᵀ of each update U·S·Vᵀ, by the same names.

        Those of one shape are orthogonalised together, which a GPU is quicker at: it starts fewer kernels.
        """
        by_shape: dict[torch.Size, list[str]] = {}
        for name, update in updates.items():
            by_shape.setdefault(update.shape, []).append(name)
        made: dict[str, Tensor] = {}
        for names in by_shape.values():
            made |= zip(names, self._one_shape(torch.stack([updates[name] for name in names])))
        return made


def cost(shape: Sequence[int]) -> int:
    """Multiplications in an iteration of Newton and Schulz."""
    small, large = sorted(shape)
    return small**2 * (2 * large + small)


def _muon(
    matrices: Mapping[str, nn.Parameter], momenta: Named, step: int, config: InnerSection, orthogonal: Orthogonal
) -> None:
    # One operation at a time: whether two are fused, and so rounded once, depends on the machine.
    rate, mu = learning_rate(step, config), config.momentum
    for batch in _batches(matrices, orthogonal.ranks):
        momentum = [momenta[name] for name in batch]
        own = [_own(matrix) for matrix in batch.values()]
        updates = torch._foreach_mul([_own(matrix.grad) for matrix in batch.values()], 1 - mu)
        torch._foreach_mul_(momentum, mu)
        torch._foreach_add_(momentum, updates)
        torch._foreach_add_(updates, torch._foreach_mul(momentum, mu))  # Nesterov
        made = orthogonal(dict(zip(batch, updates)))
        scales = [rate * 0.2 * math.sqrt(max(matrix.shape)) for matrix in batch.values()]
        torch._foreach_mul_(own, 1 - rate * config.weight_decay)
        torch._foreach_sub_(own, torch._foreach_mul([made[name] for name in batch], scales))


def _batches(matrices: Mapping[str, nn.Parameter], ranks: int) -> Iterable[dict[str, nn.Parameter]]:
    """Matrices that are orthogonalised at once, the dearest first; a multiple of `ranks`, except for the last ones."""
    ordered = sorted(_with_gradients(matrices), key=lambda it: cost(it[1].shape), reverse=True)
    while ordered:
        largest = max(matrix.shape.numel() for _, matrix in ordered)
        size = ranks * max(1, (BATCH if ordered[0][1].is_cuda else CACHED) // (ranks * largest))
        yield dict(ordered[:size])
        ordered = ordered[size:]


def _with_gradients(parameters: Mapping[str, nn.Parameter]) -> Iterable[tuple[str, nn.Parameter]]:
    return ((name, it) for name, it in parameters.items() if it.grad is not None)


def _own(tensor: Any) -> Any:
    """What this process has of a tensor, which may be a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _orthogonal(updates: Tensor) -> Tensor:
    """About U·Vᵀ of each update U·S·Vᵀ, [updates, rows, columns].

    By Newton and Schulz's iteration, in bfloat16 on a GPU.
    """
    a, b, c = QUINTIC
    x = updates.bfloat16() if updates.is_cuda else updates
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).type_as(updates)


def _orthogonal_exactly(updates: Tensor) -> Tensor:
    """`_orthogonal`, with the same bits on every machine.

    All factors are multiples of 1 / GRID. So a product of two, and every partial sum of such products, is a multiple of
    1 / GRID². No such sum exceeds 4, by the inequality of Cauchy and Schwarz: rows of x and columns of the polynomial
    are shorter than 1.3 and 3. A double holds multiples of 2⁻⁴⁸ up to 32 exactly, in whatever order they are added.
    """
    a, b, c = QUINTIC
    x = updates.double()
    norms = x.new_tensor([max(_exact_norm(update), SMALLEST) for update in updates])
    tall = x.shape[1] > x.shape[2]
    x = _on_grid((x.mT if tall else x) / norms.view(-1, 1, 1))
    for _ in range(ITERATIONS):
        gram = _on_grid(x @ x.mT)
        polynomial = _on_grid(gram * b + _on_grid(gram @ gram) * c)
        x = _on_grid(x * a + _on_grid(polynomial @ x))
    return (x.mT if tall else x).type_as(updates)


def _on_grid(x: Tensor) -> Tensor:
    return x.mul_(GRID).round_().div_(GRID).add_(0.0)  # no zero is negative


def _exact_norm(matrix: Tensor) -> float:
    """The Frobenius norm, rounded once: rows of squares of whole numbers below 2¹⁹ add up without rounding."""
    largest = matrix.abs().max().item()
    if largest == 0.0:
        return 0.0
    whole = (matrix.double() * (2.0**19 / largest)).round_()
    return largest * 2.0**-19 * math.sqrt(math.fsum(whole.square_().sum(dim=1).tolist()))


def step_vectors(
    layout: Layout,
    weights: Tensor,
    moments: tuple[Tensor, Tensor, int],
    gradient: Tensor,
    step: int,
    config: InnerSection,
) -> None:
    """`take_step` on flat vectors of shape [parameters]: a daemon's half of synchronous training.

    Args:
        layout: where each parameter lies in the vectors.
        weights: changed in place.
        moments: the optimizer's two vectors, changed in place, and the number of steps that they are made of.
        gradient: clipped in place.
        step: index of the step in the whole run.
    """
    parameters = {name: nn.Parameter(view) for name, view in layout.views(weights).items()}
    for name, view in layout.views(gradient).items():
        parameters[name].grad = view
    first, second, steps = moments
    take_step(
        parameters, Moments(layout.views(first), layout.views(second), steps), step, config, Orthogonal(exact=True)
    )
