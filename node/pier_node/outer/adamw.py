"""AdamW for every part of a site: a step on named tensors, or on flat vectors. Pure.

AdamW: Loshchilov and Hutter, arXiv 1711.05101. Linear warmup and cosine decay as in GPT-3, arXiv 2005.14165.

On a CPU, PyTorch's fused kernel gives the same bits for separate tensors and for views of one flat vector, with any
number of threads. Synchronous training relies on this, because there every daemon takes the step itself. The kernel is
called as a function: creating a `torch.optim.Optimizer` imports the compiler, which costs every process a second at its
start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from pier_node.config.run import InnerSection
from pier_node.outer.layout import Layout, is_decayed
from pier_node.outer.learning_rate import learning_rate

EPSILON = 1e-8
Named = Mapping[str, Tensor]


@torch.no_grad()
def take_step(
    parameters: Mapping[str, nn.Parameter], first: Named, second: Named, adam_step: int, step: int, config: InnerSection
) -> None:
    """Clip the parameters' gradients and take an AdamW step, all in place. Only matrices have weight decay.

    Args:
        parameters: by name, with their gradients in `grad`.
        first: AdamW's first moments, by the same names.
        second: AdamW's second moments, by the same names.
        adam_step: number of AdamW steps that the moments are made of.
        step: index of this inner step in the whole run; it determines the learning rate.
        config: the [inner] section.
    """
    if config.clip_norm:
        nn.utils.clip_grad_norm_(parameters.values(), config.clip_norm)
    for decayed, decay in ((True, config.weight_decay), (False, 0.0)):
        names = [name for name, parameter in parameters.items() if is_decayed(parameter.shape) is decayed]
        if not names:
            continue
        chosen = [_own(parameters[name]) for name in names]
        steps = torch.full((len(names),), float(adam_step), device=chosen[0].device)
        adamw(
            chosen,
            [_own(parameters[name].grad) for name in names if parameters[name].grad is not None],
            [first[name] for name in names],
            [second[name] for name in names],
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


def _own(tensor: Any) -> Any:
    """What this process has of a tensor, which may be a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


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
        moments: AdamW's two moments, changed in place, and the number of steps that they are made of.
        gradient: clipped in place.
        step: index of the step in the whole run.
        config: the [inner] section.
    """
    parameters = {name: nn.Parameter(view) for name, view in layout.views(weights).items()}
    for name, view in layout.views(gradient).items():
        parameters[name].grad = view
    first, second, adam_step = moments
    take_step(parameters, layout.views(first), layout.views(second), adam_step, step, config)
