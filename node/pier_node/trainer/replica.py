"""The model on one worker's device: its gradients, its AdamW, and copies to and from vectors in host memory.

Copies go parameter by parameter, so that the device never holds more than during an inner step (Pier's memory-aware
outer update, arXiv 2511.17849).

The gradient of an inner step uses micro-batches within a worker and an all-reduce between the workers of a site. The
loss is the mean over the site's whole batch, even if the workers' shares are unequal: every token has the weight 1 /
(tokens of the site). So the gradients add up to that of the mean, and no mean of unequal means is taken.

Muon's matrices are dealt among the workers: each orthogonalises its share. As in Dion's implementation of Muon (arXiv
2504.05295), a worker gets the whole update of its matrices from those that have the parts, and sends everyone their
part of the result: however the workers share the model, every number travels twice at most. With ddp every worker has
all updates, and only results travel.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from pier_node.base.units import printable
from pier_node.config.run import InnerSection, ModelSection, RunConfig
from pier_node.engine.parameters import Part, Vectors, is_sharded, local, trained
from pier_node.outer.inner_optimizer import Moments, Named, Orthogonal, cost, gradient_norm, take_step
from pier_node.outer.layout import Layout
from pier_node.trainer import devices
from pier_node.trainer.data.corpus import Batch
from pier_node.trainer.data.prefetch import Rows
from pier_node.trainer.data.tokens import Tokenizer, document_separator, pieces
from pier_node.trainer.model.decoder import Decoder, stream
from pier_node.trainer.model.evaluate import Losses, row_losses, summed_losses
from pier_node.trainer.model.hub import HubDecoder, empty_model
from pier_node.trainer.model.loss import NO_TOKEN, logit_gradient
from pier_node.trainer.parallel import DDP, Checkpointing, Parallel


class Dealt(Orthogonal):
    """Orthogonalises matrices together with all workers of the site, which must all do the same.

    Args:
        parts: what this worker holds of each parameter.
        shapes: of the whole parameters, by name.
    """

    def __init__(self, parts: Sequence[Part], shapes: dict[str, torch.Size]) -> None:
        super().__init__()
        self.ranks, self._own, self._shapes = dist.get_world_size(), dist.get_rank(), shapes
        told: list[Sequence[Part]] = [()] * self.ranks
        dist.all_gather_object(told, parts)
        self._parts = [{part.name: part for part in each} for each in told]

    def __call__(self, updates: Named) -> Named:
        """This worker's parts of the results, from its parts of the updates."""
        owners, like = self._owners(updates), next(iter(updates.values()))
        wire = like.new_empty(0, dtype=torch.bfloat16 if like.is_cuda else like.dtype)  # as they are orthogonalised
        mine = [name for name in updates if owners[name] == self._own]
        whole = {name: wire.new_empty(self._shapes[name]) for name in mine}
        givers = {name: self._givers(name, owner) for name, owner in owners.items()}
        _exchange(
            [[updates[it] for it in updates if owners[it] == to and self._own in givers[it]] for to in self._all],
            [[self._place(whole[it], rank, it) for it in mine if rank in givers[it]] for rank in self._all],
            wire,
        )
        made = super().__call__(whole)
        results = {name: torch.empty_like(update) for name, update in updates.items()}
        _exchange(
            [[self._place(made[it], to, it) for it in mine] for to in self._all],
            [[results[it] for it in updates if owners[it] == rank] for rank in self._all],
            wire,
        )
        return results

    @property
    def _all(self) -> range:
        return range(self.ranks)

    def _owners(self, names: Iterable[str]) -> dict[str, int]:
        """Who orthogonalises which matrix: the dearest first, each by the worker that has the least to do."""
        costs, owners = [0] * self.ranks, dict[str, int]()
        for name in sorted(names, key=lambda it: cost(self._shapes[it]), reverse=True):
            owners[name] = min(self._all, key=lambda rank: costs[rank])
            costs[owners[name]] += cost(self._shapes[name])
        return owners

    def _givers(self, name: str, owner: int) -> set[int]:
        """Who gives the owner each part of a matrix: the owner itself what it has, and else the first that has it."""
        first: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        for rank in (owner, *self._all):
            part = self._parts[rank][name]
            first.setdefault((part.starts, part.sizes), rank)
        return set(first.values())

    def _place(self, whole: Tensor, rank: int, name: str) -> Tensor:
        """What a worker holds of a matrix."""
        part = self._parts[rank][name]
        return whole[tuple(slice(start, start + size) for start, size in zip(part.starts, part.sizes))]


def _exchange(given: list[list[Tensor]], wanted: list[list[Tensor]], wire: Tensor) -> None:
    """Send tensors to each worker, and fill others with what each sends. They travel in the type of `wire`."""
    out = torch.cat([wire, *(it.flatten().to(wire.dtype) for tensors in given for it in tensors)])
    received, sent = ([sum(it.numel() for it in tensors) for tensors in each] for each in (wanted, given))
    arrived = wire.new_empty(sum(received))
    dist.all_to_all_single(arrived, out, received, sent)
    places = [it for tensors in wanted for it in tensors]
    for place, values in zip(places, torch.split(arrived, [it.numel() for it in places])):
        place.copy_(values.view(place.shape))


@dataclass(frozen=True)
class Shares:
    """Among how many the site's batch is dealt.

    Attributes:
        own: which of them this worker is.
        group: all of them; None: all workers.
        sharded: none of them has the whole model.
    """

    count: int = 1
    own: int = 0
    group: dist.ProcessGroup | None = None
    sharded: bool = False

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all of them, in place."""
        if self.count > 1:
            dist.all_reduce(value, group=self.group)
        return value


ALONE = Shares()

SAMPLE_TOKENS = 100
SAMPLE_SECONDS = 0.5
"""What a sample of text may take, except for its last token."""

PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]
"""What selective checkpointing keeps: it takes most of the time of a block."""


def mean_gradient(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    sequences: int,
    inner: InnerSection,
    bf16: bool,
    shares: Shares = ALONE,
) -> Tensor:
    """Leave the gradient of the site's mean loss in every parameter's `grad`; return that loss, a scalar on the device.

    Args:
        model: the decoder, DistributedDataParallel around it, or spread by FSDP2 or tensor parallelism.
        inputs: this worker's rows, [rows, context] token ids.
        targets: their next tokens, [rows, context].
        sequences: number of rows of the whole site.
        inner: the [inner] section: the number of rows to compute at once (no more than in a batch of one site), and the
            z-loss.
        bf16: compute under autocast to bfloat16.
        shares: of the batch.
    """
    tokens = sequences * inputs.shape[1]
    model.zero_grad(set_to_none=True)
    loss = torch.zeros((), device=inputs.device)
    most = -(-sequences // shares.count)  # rows of a worker
    # In a solo start `sequences` is the batch of all sites, which need not fit on one.
    size = inner.micro_batch or -(-inner.batch_size // shares.count)
    pieces = [*zip(torch.split(inputs, size), torch.split(targets, size))]
    if shares.sharded:  # all compute the same number of pieces, because they gather blocks together
        pieces += [(inputs[:1], torch.full_like(targets[:1], NO_TOKEN))] * (-(-most // size) - len(pieces))
    for index, (some_inputs, some_targets) in enumerate(pieces):
        with _reduced(model, index == len(pieces) - 1):
            with torch.autocast(inputs.device.type, torch.bfloat16, enabled=bf16):
                part = model(some_inputs, targets=some_targets, z_loss=inner.z_loss) / tokens
            torch.autograd.backward(part * shares.count)  # the gradient is averaged over the shares
        loss += part.detach()
    return shares.sum(loss)


def _reduced(model: nn.Module, now: bool) -> AbstractContextManager[None]:
    return nullcontext() if now or not isinstance(model, DistributedDataParallel) else model.no_sync()


class Replica:
    """One worker's copy of the model, or its part of it. Its weights are undefined until `load_weights`.

    Args:
        config: the run.
        device: the device that holds the model.
        workers: number of workers in the site; if there are several, the default process group connects them.
        parallel: how they share the model; not auto.

    Attributes:
        shares: of the site's batch.
        gradient_norm: of the last inner step, before it was clipped, a scalar on the device.
    """

    def __init__(self, config: RunConfig, device: torch.device, workers: int, parallel: Parallel = DDP) -> None:
        self.layout = Layout.of(config.model)
        self.adam_step = 0
        self.gradient_norm = torch.tensor(torch.nan)
        self.context = config.model.context
        self._inner, self._device = config.inner, device
        self._bf16 = devices.uses_bf16(device, config.inner.precision)
        self._several, own = workers > 1, dist.get_rank() if workers > 1 else 0
        self.shares = Shares(workers, own)
        if parallel.shards(workers):
            from pier_node.trainer.sharding import spread

            self._model = empty_model(config.model)
            mesh = spread(self._model, parallel, workers, device, self._bf16)
            self._model.to_empty(device=device)
            self.shares = Shares(mesh.size(), mesh.get_local_rank(), mesh.get_group(), sharded=True)
        else:
            self._model = _undefined(config.model, self.layout, device)
        self._compiled = devices.compiles(device, config, parallel)
        self._model.separator = document_separator(config.data)
        if isinstance(self._model, Decoder):
            self._model.bf16_stream = self._bf16 and config.inner.residual_stream == "bf16"
        self._parameters = trained(self._model)
        self._vectors = Vectors(self._model, own)
        for block in self._model.blocks.values():
            _prepare(block, parallel.checkpointing, self._compiled)
        if self._compiled and isinstance(self._model, Decoder):
            self._model.logit_gradient = torch.compile(logit_gradient)
            self._model.join_products()
        self._trained: nn.Module = self._model
        if workers > 1 and not self.shares.sharded:
            # Weights come by load_weights, so there is nothing to broadcast at the start. Gradients are views of the
            # buckets that are sent, so they take memory only once.
            self._trained = DistributedDataParallel(self._model, init_sync=False, gradient_as_bucket_view=True)

    def load_weights(self, flat: Tensor) -> None:
        """Load this worker's part of the weights from a vector, shape [parameters]."""
        if reshard := getattr(self._model, "reshard", None):
            reshard()  # after an evaluation FSDP2 still has the outermost parameters, and would not gather them again
        self._vectors.take(flat.numpy())

    def load_moments(self, first: Tensor, second: Tensor, step: int) -> None:
        """Load AdamW's moments from two vectors, shape [parameters], with `step` steps behind them."""
        self.adam_step = step
        for moment, flat in zip(self._moments, (first, second)):
            self._vectors.take(flat.numpy(), moment)

    def store_weights(self, flat: Tensor) -> None:
        """Write this worker's part of the weights to a vector, unless another writes the same."""
        self._vectors.put(flat.numpy())

    def store_moments(self, first: Tensor, second: Tensor) -> None:
        """Write this worker's part of AdamW's moments to two vectors, unless another writes the same."""
        for moment, flat in zip(self._moments, (first, second)):
            self._vectors.put(flat.numpy(), moment)

    def store_gradient(self, flat: Tensor) -> None:
        """Write this worker's part of the gradient of the last call of `gradient`, unless another writes the same."""
        # An expert that no token went to has none, and the vector still has that of an earlier step.
        gradients = {
            name: torch.zeros_like(it) if it.grad is None else it.grad for name, it in self._parameters.items()
        }
        self._vectors.put(flat.numpy(), gradients)

    def gradient(self, rows: Rows | Batch, sequences: int) -> Tensor:
        """Compute the gradient of the mean loss over the site's `sequences`; return the loss, on the device.

        `rows` are this worker's share of them.
        """
        loss = self._backward(rows, sequences)
        with torch.no_grad():
            self.gradient_norm = gradient_norm(self._parameters)
        return loss

    def _backward(self, rows: Rows | Batch, sequences: int) -> Tensor:
        inputs, targets = (torch.as_tensor(part).to(self._device, non_blocking=True) for part in rows)
        loss = mean_gradient(self._trained, inputs, targets, sequences, self._inner, self._bf16, self.shares)
        for parameter in self._parameters.values():
            gradient = parameter.grad
            if gradient is None or not is_sharded(parameter) or not is_sharded(gradient):
                continue
            if gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(placements=parameter.placements)  # norms of divided positions
        return loss

    def train(self, step: int, rows: Rows | Batch, sequences: int) -> Tensor:
        """Do inner step `step`, counted over the whole run; returns the loss, on the device."""
        loss = self._backward(rows, sequences)
        moments = Moments(*self._moments, self.adam_step)
        self.gradient_norm = take_step(self._parameters, moments, step, self._inner, self._orthogonal)
        self.adam_step += 1
        return loss

    def evaluate(self, flat: Tensor, windows: Iterable[Batch]) -> float:
        """Validation loss of the weights in a vector. They stay loaded: a later job loads its own weights.

        Args:
            windows: this worker's. All of several workers must call this, and get the mean over all windows.
        """
        self.load_weights(flat)
        if self.shares.sharded:
            windows = self._as_many([*windows])
        sums = torch.tensor(summed_losses(self._model, windows, self._bf16), dtype=torch.float64, device=self._device)
        total, count = self.shares.sum(sums).tolist()
        return float(total / count)

    def _as_many(self, windows: list[Batch]) -> list[Batch]:
        """The windows, and empty ones up to the largest number of a worker: all gather blocks together."""
        most = torch.tensor(len(windows), device=self._device)
        if self.shares.count > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.shares.group)
        row = np.zeros((1, self.context), dtype=np.int64)
        return windows + [(row, row + NO_TOKEN)] * (int(most) - len(windows))

    def rate(self, flat: Tensor, rows: npt.NDArray[np.uint8], at_once: int) -> Losses:
        """Mean loss of each row with the weights in a vector, which stay loaded: see `row_losses`."""
        self.load_weights(flat)
        return row_losses(self._model, rows, at_once, self._bf16)

    def sample(self, tokenizer: Tokenizer, letters: int) -> str:
        """Text that the loaded weights write from the start of a document; "" if the workers share the model.

        The dice are always the same, so that samples differ by what was learned between them. `letters` is the greatest
        length of the text.
        """
        if self.shares.sharded:
            return ""
        prompt, deadline = [tokenizer.separator or 0], time.monotonic() + SAMPLE_SECONDS
        # The compiler would make code for each length of the text. Importing it takes a second, too.
        eager = torch.compiler.set_stance("force_eager") if self._compiled else nullcontext()
        with eager, torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            ids = _until(deadline, stream(self._model, prompt, SAMPLE_TOKENS, temperature=0.8))
            return printable("".join(pieces(tokenizer, prompt, ids)))[:letters]

    @cached_property
    def _moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        # Created when first needed: a worker that only computes gradients has none.
        mine = {name: local(parameter.detach()) for name, parameter in self._parameters.items()}
        first, second = ({name: torch.zeros_like(it) for name, it in mine.items()} for _ in range(2))
        return first, second

    @cached_property
    def _orthogonal(self) -> Orthogonal | None:
        if self._inner.optimizer != "muon" or not self._several:
            return None
        return Dealt(self._vectors.parts, {name: it.shape for name, it in self._parameters.items()})


def _until(deadline: float, ids: Iterable[int]) -> Iterator[int]:
    """The ids that come before a time of the monotonic clock, and one more."""
    for id in ids:
        yield id
        if time.monotonic() > deadline:
            return


def _undefined(config: ModelSection, layout: Layout, device: torch.device) -> Decoder | HubDecoder:
    model = empty_model(config)
    if isinstance(model, HubDecoder):
        return model.to_empty(device=device)
    # Not `to_empty`: on the meta device it imports SymPy, which takes a third of a second of every worker's start.
    memory = {entry.name: torch.empty(entry.shape, device=device) for entry in layout.entries}
    model.load_state_dict(memory, assign=True)
    return model


def _prepare(block: nn.Module, checkpointing: Checkpointing, compiled: bool) -> None:
    """Compile a block, and have it compute again what it does not keep for its backward pass."""
    if checkpointing == "none":
        if compiled:
            block.compile()
        return
    forward, contexts = block.forward, noop_context_fn
    if checkpointing == "selective":
        contexts = partial(create_selective_checkpoint_contexts, PRODUCTS)
    elif compiled:
        forward = torch.compile(forward)
    again = partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
    setattr(block, "forward", again)  # noqa: B010 - a method, for mypy
