"""The cost of training: FLOPs (PaLM, arXiv 2204.02311, appendix B) and memory, defined once for reports and plans.

The memory is the minimum that training a model takes, independent of the machine.
"""

from __future__ import annotations

import re
from typing import get_args

from pier_node.config.run import ModelSection, RunConfig
from pier_node.outer.layout import Layout
from pier_node.trainer.parallel import Checkpointing, Mode, Parallel


def flops_per_token(config: ModelSection) -> float:
    """Floating-point operations of a forward and a backward pass, per token: 6 N + 12 layers * dim * context.

    N excludes parameters that are looked up rather than multiplied: positions, and the token embedding, which comes
    first, unless it is also the head. The second term is attention's scores and sums, without a discount for causality,
    as is usual.
    """
    entries = Layout.of(config).entries
    looked_up = {"positions.weight"} if config.tie_embeddings else {"positions.weight", entries[0].name}
    multiplied = sum(entry.size for entry in entries if entry.name not in looked_up)
    return 6.0 * multiplied + 12.0 * config.layers * config.dim * config.context


def forward_flops_per_token(config: ModelSection) -> float:
    """FLOPs per token of prediction without training: a backward pass costs twice a forward pass."""
    return flops_per_token(config) / 3


STATE = 16
"""Bytes per parameter: fp32 weights, gradients and AdamW's two moments."""
LOGITS = 6
"""Bytes per logit: 16 bits, plus 32 bits for the loss."""
FLOAT = 4
IN_BLOCK = re.compile(r"\.[0-9]+\.")
"""Is in the name of a parameter of a block, whoever builds the model."""
CHUNK = 2**25
"""Logits that are computed at once, at most, but for one token: 128 MiB of them in fp32. See trainer/model/loss.py."""
GPU_CHUNK = 4 * CHUNK
"""The same on a GPU, which has the memory. To add up the head's gradients of chunks takes time (docs/results.md)."""
LOSS = 12
"""Bytes per logit at the loss: fp32 log-probabilities and two gradients."""
WHOLE, DIVIDED = 8, 4
"""Bytes per logit at a loss by parts of the vocabulary: what each worker has of all for a moment, and of its part."""
SENT = 2
"""Bytes per parameter for sending weights in bf16."""


def training_bytes(config: ModelSection, sequences: int = 1) -> int:
    """Bytes of state and logits when that many sequences are computed at once; activations are additional."""
    return STATE * Layout.of(config).length + LOGITS * sequences * config.context * config.vocab_size


def sent_bytes(config: ModelSection) -> int:
    """Bytes of the weights in transit."""
    return SENT * Layout.of(config).length


def activations(
    model: ModelSection, tokens: int, parallel: Parallel, element: int, residual: int
) -> tuple[float, float]:
    """Bytes that a worker keeps of a block for its backward pass, and of all that the block computes.

    Norms and attention are fused.

    Args:
        tokens: that the worker's group computes at once.
        element: bytes of an element.
        residual: bytes of an element of the residual stream.
    """
    part = tokens / parallel.tensor
    keys = 2 * model.kv_heads * model.dim // model.heads
    hidden, inner = (1, 1) if model.form == "gpt2" else (2, 2)  # outputs of matrices, and what comes of them
    stream = residual * part * model.dim
    casts = 3 + hidden if residual > element else 2  # autocast gives each matrix that reads a norm a copy of its own
    normed = element * tokens * model.dim
    attention = element * part * (2 * model.dim + keys)
    all_of_it = 2 * stream + casts * normed + attention + element * part * (hidden + inner) * model.ffn_dim
    kept = {
        "none": all_of_it,
        "selective": stream + attention + element * part * (2 * model.dim + hidden * model.ffn_dim),
        "full": stream,
    }
    return kept[parallel.checkpointing], all_of_it


def device_bytes(config: RunConfig, parallel: Parallel, workers: int, bf16: bool) -> int:
    """Peak memory of a worker's device while it trains with AdamW: a prediction, without what PyTorch itself takes.

    The peak is at the loss, at the beginning of the backward pass, or at its end. With FSDP2 two blocks are gathered at
    a time, and the outermost parameters (embedding, head) all the time.
    """
    model, shares = config.model, workers // parallel.tensor
    layout = Layout.of(model)
    outermost = sum(entry.size for entry in layout.entries if not IN_BLOCK.search(entry.name)) / parallel.tensor
    block = layout.length / parallel.tensor - outermost
    block /= model.layers
    gathers = parallel.mode != "ddp" and shares > 1
    held = layout.length / parallel.parts(workers)
    element, residual = (2, 4) if bf16 else (4, 4)
    if bf16 and (gathers or config.inner.residual_stream == "bf16"):
        residual = 2
    rows = config.inner.micro_batch or -(-config.inner.batch_size // shares)
    tokens = rows * model.context
    kept, once = activations(model, tokens, parallel, element, residual)
    again = 0.0 if parallel.checkpointing == "none" else once
    at_loss = LOSS * tokens * model.vocab_size / parallel.tensor
    if parallel.tensor > 1:
        at_loss = (WHOLE + DIVIDED / parallel.tensor) * tokens * model.vocab_size + 2 * element * tokens * model.dim
    elif tokens * model.vocab_size > GPU_CHUNK and not model.transformers:  # its gradients wait for the backward pass
        at_loss = LOSS * GPU_CHUNK + element * tokens * model.dim + 2 * FLOAT * model.vocab_size * model.dim
    if gathers:
        state, whole, of_head = FLOAT * held, element * outermost, element * outermost / 2
        forward = 3 * state + whole + model.layers * kept
        done = (3 * element + FLOAT) * block - kept  # two blocks, the gradients of one, and their sum on its way
        begin = forward + of_head + max(done, 3 * element * block + again)
        end = 4 * state + whole + (element + FLOAT) * outermost + FLOAT * block
    else:
        state, whole = FLOAT * held, element * held if bf16 else 0.0  # autocast keeps copies of the weights
        forward = 3 * state + whole + model.layers * kept
        begin, end = forward + again, 4 * state + once
        if parallel.tensor > 1:  # DTensor computes the whole gradient of the embedding, and copies its part
            end += (2 - 1 / parallel.tensor) * FLOAT * model.vocab_size * model.dim
    return int(max(forward + at_loss, begin, end))


USABLE = 0.9
"""Part of a device's memory that a worker may fill: PyTorch's allocator and the driver take the rest."""


def chosen(parallel: Parallel, config: RunConfig, workers: int, memory: int, bf16: bool) -> Parallel:
    """What `auto` stands for: the first way that fits into the devices, or else the one that takes the least memory.

    Args:
        memory: bytes of the smallest device; 0: it has none of its own, as a CPU.
    """
    if parallel.mode != "auto":
        return parallel
    shares = workers // parallel.tensor
    modes: list[Mode] = ["ddp"] if shares == 1 else ["fsdp"] if parallel.tensor > 1 else ["ddp", "fsdp"]
    stronger = [*get_args(Checkpointing)]
    for checkpointing in stronger[stronger.index(parallel.checkpointing) :]:
        for mode in modes:
            way = Parallel(mode, parallel.tensor, checkpointing)
            if not memory or device_bytes(config, way, workers, bf16) <= USABLE * memory:
                return way
    return way
