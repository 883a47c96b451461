"""The cross-entropy of the next token, without the logits of all tokens at once.

A batch of many tokens over a large vocabulary is taken in chunks. The gradients with respect to the hidden states and
to the head are computed with the loss, chunk by chunk, so that neither pass ever has more than one chunk of logits, and
nothing is computed twice. Small models keep the usual way.

z-loss, z · ln²Σeˣ per token, keeps the logits from drifting (Chowdhery et al., arXiv 2204.02311, section 5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pier_node.engine.parameters import is_sharded, local
from pier_node.trainer.model.cost import CHUNK, GPU_CHUNK

NO_TOKEN = -100
"""Stands for a target that does not count."""


def summed_loss(
    hidden: Tensor, head: Tensor, targets: Tensor, z_loss: float = 0.0, gradient: LogitGradient | None = None
) -> Tensor:
    """Sum of the cross-entropy in nats, plus the z-loss, except where the target is NO_TOKEN; a scalar in fp32.

    Args:
        hidden: what the head multiplies, [rows, context, dim].
        head: weights, [vocab, dim]. Divided ones (DTensor) have divided logits, which are not taken in chunks.
        targets: token ids, [rows, context].
        z_loss: the coefficient z.
        gradient: compiled, if it is; None: `logit_gradient`.
    """
    if targets.numel() * len(head) > _chunk(head) and not is_sharded(head):
        given = hidden.flatten(0, 1), head, targets.flatten(), z_loss, gradient or logit_gradient
        loss: Tensor = _Chunked.apply(*given)  # type: ignore[no-untyped-call]
        return loss
    return loss_of(functional.linear(hidden, head), targets, z_loss)


def loss_of(logits: Tensor, targets: Tensor, z_loss: float) -> Tensor:
    """`summed_loss` of logits, [rows, context, vocab]."""
    logits = logits.flatten(0, 1).float()
    loss = functional.cross_entropy(logits, targets.flatten(), ignore_index=NO_TOKEN, reduction="sum")
    if z_loss:
        loss = loss + z_loss * (logits.logsumexp(dim=-1).square() * (targets.flatten() != NO_TOKEN)).sum()
    return local(loss)


def logit_gradient(logits: Tensor, targets: Tensor, z_loss: float, vocab: int) -> tuple[Tensor, Tensor]:
    """The loss of logits, [tokens, vocab or more], and its gradient with respect to them, of their type.

    Args:
        logits: this function's own: it may change them. Columns from `vocab` on stand for no token.
        targets: token ids, [tokens].
    """
    dtype, wanted = logits.dtype, targets.clamp(min=0)[:, None]
    counts = (targets != NO_TOKEN)[:, None]
    logits = logits.float()
    if logits.shape[1] > vocab:
        logits[:, vocab:] = -torch.inf
    total, right = logits.logsumexp(dim=-1, keepdim=True), logits.gather(1, wanted)
    loss = ((total - right + z_loss * total.square()) * counts).sum()
    factor = counts * (1 + 2 * z_loss * total)
    at_right = (right - total).exp() * factor - counts.float()
    slope = logits.sub_(total).exp_().mul_(factor).to(dtype)
    return loss, slope.scatter_(1, wanted, at_right.to(dtype))


LogitGradient = Callable[[Tensor, Tensor, float, int], tuple[Tensor, Tensor]]
ALIGNED = 64
"""A GPU multiplies matrices fast if their sides are multiples of this: a vocabulary is padded with columns of zeros."""


def _chunk(head: Tensor) -> int:
    return GPU_CHUNK if head.is_cuda else CHUNK


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, z_loss: float, gradient: LogitGradient
    ) -> Tensor:
        """[tokens, dim], [vocab, dim], [tokens] -> the loss."""
        kind, vocab = hidden.device.type, len(head)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.dtype
        factor, loss = head.to(dtype), torch.zeros((), device=hidden.device)
        if hidden.is_cuda:
            factor = functional.pad(factor, (0, 0, 0, -vocab % ALIGNED))
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_head = torch.zeros_like(factor, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), size := max(1, _chunk(head) // vocab)):
            chosen = slice(start, start + size)
            states, wanted = hidden[chosen].to(dtype), targets[chosen]
            logits = states @ factor.T  # [chunk, vocab, and its padding]
            if by_hidden is None and by_head is None:
                loss += loss_of(logits[None, :, :vocab], wanted, z_loss)
                continue
            nats, slope = gradient(logits, wanted, z_loss, vocab)
            loss += nats
            if by_hidden is not None:
                by_hidden[chosen] = slope @ factor
            if by_head is not None:
                if dtype == by_head.dtype:
                    by_head.addmm_(slope.T, states)
                else:
                    by_head += slope.T @ states
        ctx.save_for_backward(by_hidden, None if by_head is None else by_head[:vocab])
        ctx.dtype = head.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """The gradients that the forward pass has computed, times that of the loss."""
        by_hidden, by_head = ctx.saved_tensors
        (factor,) = gradients
        return (
            None if by_hidden is None else by_hidden * factor,
            None if by_head is None else (by_head * factor).to(ctx.dtype),
            None,
            None,
            None,
        )
