"""One stage of the model: its blocks, and forward, loss and backward of microbatches with the sum of their gradients.

A model is cut into stages of consecutive blocks (SkipPipe, arXiv 2502.19913). Stage 0 also has the embeddings, the
final norm and the head. So tied embeddings stay in one stage, and labels never leave the sites that hold it.

If the blocks write to a subspace of the residual stream, only its channels are sent, and the token ids as one more
channel: see pipeline/activation_codec.py.

The gradient of a microbatch is kept separately until all earlier ones are in the sum. So the sum has the same bits in
whatever order microbatches return. What a backward needs is kept from the forward on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pier_node.base.shared import Vector
from pier_node.config.run import ModelSection, RunConfig
from pier_node.outer.layout import Entry, Layout
from pier_node.trainer import devices
from pier_node.trainer.model.hub_part import part_of_model


def stage_blocks(layers: int, stages: int) -> tuple[range, ...]:
    """The consecutive blocks of each stage, equal in number within one.

    Stage 0, which also has the ends, has fewest.
    """
    ends = [layers * (stage + 1) // stages for stage in range(stages)]
    return tuple(range(start, end) for start, end in zip([0, *ends], ends))


def stage_layout(config: ModelSection, stages: int, stage: int) -> Layout:
    """The layout of one stage's parameters in a vector, in the order of the whole model."""
    return Layout.laid((entry.name, entry.shape) for entry in _held(config, stages, stage))


def scatter(config: ModelSection, stages: int, whole: Vector, stage: int) -> Vector:
    """The parameters of one stage, taken from a vector of the whole model, shape [parameters]."""
    return np.concatenate([whole[it.offset : it.offset + it.size] for it in _held(config, stages, stage)])


def gather(config: ModelSection, stages: int, parts: Mapping[int, Vector], whole: Vector) -> None:
    """Write the parameters of stages to their places in a vector of the whole model.

    Raises ValueError: wrong length.
    """
    for stage, part in parts.items():
        held, offset = _held(config, stages, stage), 0
        if (length := sum(entry.size for entry in held)) != len(part):
            raise ValueError(f"stage {stage} has {length} parameters, not {len(part)}")
        for entry in held:
            whole[entry.offset : entry.offset + entry.size] = part[offset : offset + entry.size]
            offset += entry.size


def _held(config: ModelSection, stages: int, stage: int) -> list[Entry]:
    blocks = stage_blocks(config.layers, stages)[stage]
    return [it for it in Layout.of(config).entries if (stage == 0 if it.block is None else it.block in blocks)]


Gradients = dict[str, Tensor]


@dataclass
class _Iteration:
    """What a stage has computed of the microbatches of one iteration.

    Attributes:
        order: the microbatches whose gradients are not in `total` yet, in the order of summing.
        inputs, outputs: what a microbatch's backward needs.
        kept: gradients of microbatches that are not in `total`; of those in `done` they are complete.
        total: sum of the gradients of `summed` microbatches.
    """

    order: list[int]
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    kept: dict[int, Gradients] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    total: Gradients = field(default_factory=dict)
    summed: int = 0


class Stage:
    """The blocks of one stage on a device. Its weights are undefined until `load`.

    Building it raises PierError: this model cannot be divided, or transformers, which builds it, is not here.
    """

    def __init__(self, config: RunConfig, stage: int, device: torch.device) -> None:
        stages = config.pipeline.stages
        self.stage, self.layout = stage, stage_layout(config.model, stages, stage)
        self._device, self._z_loss, self._config = device, config.inner.z_loss, config.model
        self._bf16 = devices.uses_bf16(device, config.inner.precision)
        self._dtype = torch.bfloat16 if self._bf16 else torch.float32
        blocks = stage_blocks(config.model.layers, stages)[stage]
        memory = {it.name: torch.empty(it.shape, device=device) for it in self.layout.entries}
        self._model = part_of_model(config.model, blocks, stage == 0, memory)
        self._parameters = dict(self._model.named_parameters())
        self._now = _Iteration([])

    def load(self, flat: Tensor) -> None:
        """Load the weights from a vector, shape [parameters of the stage]."""
        self.layout.load(self._model, flat)

    def begin(self, microbatches: Sequence[int]) -> None:
        """Reset. These microbatches will arrive, and their gradients are summed in this order."""
        self._now = _Iteration([*microbatches])

    def embed(self, microbatch: int, tokens: Tensor) -> Tensor:
        """Forward of a new microbatch at stage 0: [sequences, time] token ids -> [sequences, time, channels]."""
        here = tokens.to(self._device)
        with self._autocast():
            return self._sent(microbatch, self._model.through(self._model.embed(here)), here)

    def forward(self, microbatch: int, x: Tensor) -> Tensor:
        """Forward: [sequences, time, channels] -> [sequences, time, channels]."""
        taken, tokens = self._taken(x)
        self._now.inputs[microbatch] = taken
        with self._autocast():
            return self._sent(microbatch, self._model.through(self._model.all_channels(taken, tokens)), tokens)

    def loss(self, microbatch: int, x: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        """At stage 0: the mean loss in nats per token, and its gradient with respect to x."""
        last, tokens = self._taken(x)
        with self._autocast():
            loss = self._model.loss(self._model.all_channels(last, tokens), targets.to(self._device), self._z_loss)
            loss = loss / targets.numel()
        return loss.item(), self._pull(microbatch, loss, last, None)

    def backward(self, microbatch: int, gradient: Tensor) -> Tensor | None:
        """The gradient of the microbatch's input, for transit; None at stage 0.

        Completes this stage's gradient of it.
        """
        output, taken = self._now.outputs.pop(microbatch), self._now.inputs.pop(microbatch, None)
        back = self._pull(microbatch, output, taken, gradient.to(self._device, output.dtype))
        self._now.done.add(microbatch)
        self._add_up()
        return back if taken is not None else None

    def mean_gradient(self, out: Tensor) -> None:
        """Write the mean over the microbatches of this site to a vector, shape [parameters of the stage]."""
        out.zero_()
        if summed := self._now.summed:
            self.layout.store({name: total / summed for name, total in self._now.total.items()}, out)

    def _taken(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What came from another stage: the channels that blocks write to, and token ids if these are not all."""
        written, ids = x[..., : self._config.written], x[..., self._config.written :]  # of one channel, or of none
        return (
            written.to(self._device, torch.float32).requires_grad_(),
            ids.sum(dim=-1).to(self._device, torch.long),
        )

    def _sent(self, microbatch: int, stream: Tensor, tokens: Tensor) -> Tensor:
        output = self._now.outputs[microbatch] = stream[..., : self._config.written]
        sent = output.detach().to("cpu", self._dtype)
        return torch.cat([sent.float(), tokens[..., None].cpu()], dim=-1) if self._config.subspace else sent

    def _pull(self, microbatch: int, output: Tensor, taken: Tensor | None, gradient: Tensor | None) -> Tensor:
        """Backward from an output: keeps the parameters' gradients and returns the gradient of the input."""
        names, parameters = [*self._parameters], [*self._parameters.values()]
        wanted = [*parameters, *([taken] if taken is not None else [])]
        found = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        kept = self._now.kept.setdefault(microbatch, {})
        for name, part in zip(names, found):
            if part is not None:
                kept[name] = kept[name] + part if name in kept else part
        back = found[-1] if taken is not None else None
        return torch.empty(0) if back is None else back.to("cpu", self._dtype)

    def _add_up(self) -> None:
        now = self._now
        while now.order and now.order[0] in now.done:
            for name, part in now.kept.pop(now.order.pop(0)).items():
                now.total[name] = now.total[name].add_(part) if name in now.total else part.clone()
            now.summed += 1

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16)
