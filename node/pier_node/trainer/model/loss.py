"""The cross-entropy of the next token, without the logits of all tokens at once.

A batch of many tokens over a large vocabulary is taken in chunks. The gradients with respect to the hidden states and
to the head are computed with the loss, chunk by chunk, so that neither pass ever has more than one chunk of logits, and
nothing is computed twice. Small models keep the usual way.

z-loss, z · ln²Σeˣ per token, keeps the logits from drifting (Chowdhery et al., arXiv 2204.02311, section 5).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pier_node.engine.parameters import is_sharded, local
from pier_node.trainer.model.cost import CHUNK

NO_TOKEN = -100
"""Stands for a target that does not count."""


def summed_loss(hidden: Tensor, head: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """Sum of the cross-entropy in nats, plus the z-loss, except where the target is NO_TOKEN; a scalar in fp32.

    Args:
        hidden: what the head multiplies, [rows, context, dim].
        head: weights, [vocab, dim]. Divided ones (DTensor) have divided logits, which are not taken in chunks.
        targets: token ids, [rows, context].
        z_loss: the coefficient z.
    """
    if targets.numel() * len(head) > CHUNK and not is_sharded(head):
        loss: Tensor = _Chunked.apply(hidden.flatten(0, 1), head, targets.flatten(), z_loss)  # type: ignore[no-untyped-call]
        return loss
    return loss_of(functional.linear(hidden, head), targets, z_loss)


def loss_of(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """`summed_loss` of logits, [rows, context, vocab]."""
    logits = logits.flatten(0, 1).float()
    loss = functional.cross_entropy(logits, targets.flatten(), ignore_index=NO_TOKEN, reduction="sum")
    if z_loss:
        loss = loss + z_loss * (logits.logsumexp(dim=-1).square() * (targets.flatten() != NO_TOKEN)).sum()
    return local(loss)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, z_loss: float) -> Tensor:
        """[tokens, dim], [vocab, dim], [tokens] -> the loss."""
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.dtype
        factor, loss = head.to(dtype), torch.zeros((), device=hidden.device)
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), size := max(1, CHUNK // len(head))):
            chosen = slice(start, start + size)
            states, wanted = hidden[chosen].to(dtype), targets[chosen]
            counts = wanted != NO_TOKEN
            logits, wanted = (states @ factor.T).float(), wanted.clamp(min=0)[:, None]  # [chunk, vocab], [chunk, 1]
            total = logits.logsumexp(dim=-1, keepdim=True)
            nats = total - logits.gather(1, wanted)
            loss += ((nats + z_loss * total.square()) * counts[:, None]).sum()
            if by_hidden is None and by_head is None:
                continue
            slope = logits.sub_(total).exp_()
            if z_loss:
                slope.mul_(1 + 2 * z_loss * total)
            slope.scatter_add_(1, wanted, slope.new_full(wanted.shape, -1.0))
            slope = slope.mul_(counts[:, None]).to(dtype)
            if by_hidden is not None:
                by_hidden[chosen] = slope @ factor
            if by_head is not None:
                if dtype == by_head.dtype:
                    by_head.addmm_(slope.T, states)
                else:
                    by_head += slope.T @ states
        ctx.save_for_backward(by_hidden, by_head)
        ctx.dtype = head.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """The gradients that the forward pass has computed, times that of the loss."""
        by_hidden, by_head = ctx.saved_tensors
        (factor,) = gradients
        return (
            None if by_hidden is None else by_hidden * factor,
            None if by_head is None else (by_head * factor).to(ctx.dtype),
            None,
            None,
        )
