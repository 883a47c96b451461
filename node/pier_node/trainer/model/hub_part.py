"""A part of a model: a `Decoder` with some of the blocks, or some of those of a model of transformers.

Of a model of transformers each part runs the forward of the whole model, so that masks, positions and scales are
transformers' own. What is not in the part costs nothing: absent blocks hand on what they are given, absent embeddings
give zeros, and the forward ends after the last block of the part. Activations come in at its first block.

That is the same as the whole model only if blocks take nothing that depends on the tokens but the activations, and hand
on nothing else. A part checks both as it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.hub import HubDecoder, empty_model
from pier_node.trainer.model.loss import loss_of


def part_of_model(config: ModelSection, blocks: range, ends: bool, tensors: Mapping[str, Tensor]) -> Decoder | HubPart:
    """Consecutive blocks of the run's model, and with `ends` embeddings, final norm and head.

    Args:
        tensors: the parameters of the part, by name, fp32.

    Raises:
        PierError: as `empty_model` does; or the model is not the same in parts.
    """
    if config.transformers:
        whole = empty_model(config)
        assert isinstance(whole, HubDecoder)
        return HubPart(whole, blocks, ends, tensors)
    with torch.device("meta"):
        model = Decoder(config, blocks, ends)
    model.load_state_dict(tensors, assign=True)
    return model


def divisible(model: Decoder | HubDecoder) -> Decoder | HubPart:
    """A whole model of which blocks can be left out; one of transformers is not used otherwise again.

    Raises:
        PierError: the model is not the same in parts.
    """
    if isinstance(model, Decoder):
        return model
    return HubPart(model, range(model.config.layers), True, dict(model.named_parameters()))


class _Pass(NamedTuple):
    """One forward, which computes the blocks [start, stop).

    Attributes:
        x: what block `start` is given, or what follows the last block; None: what comes from the embeddings.
        stop: the forward ends before this block; None: it ends with the logits.
        without: blocks to leave out.
    """

    x: Tensor | None
    start: int
    stop: int | None
    without: Collection[int] = ()


class _Ended(Exception):
    def __init__(self, x: Tensor) -> None:
        self.x = x


class HubPart(HubDecoder):
    """Consecutive blocks of a model of transformers, used like a `Decoder` that has only these. See `part_of_model`."""

    def __init__(self, model: HubDecoder, blocks: range, ends: bool, tensors: Mapping[str, Tensor]) -> None:
        config = model.config
        super().__init__(config, model.whole)
        self._start, self._stop = blocks.start, blocks.stop
        self._now, self._tuples = _Pass(None, 0, 0), False
        if len(self.blocks) != config.layers:
            raise _indivisible(config, f"it has {len(self.blocks)} blocks of a kind, not {config.layers}")
        for name, module in self.named_modules():
            if not ends and not name.startswith(tuple(f"{block}." for block in self.blocks)):
                _bypass(module)
        held = {id(it) for name, it in self.named_parameters() if name in tensors}
        for module in self.modules():
            gone = [name for name, it in module._parameters.items() if id(it) not in held]
            module._parameters |= dict.fromkeys(gone)
        self.assign(tensors, next(iter(tensors.values())).device)
        self._check(ends)
        for index, block in enumerate(self.blocks.values()):
            block.forward = partial(self._block, index, block.forward)

    def embed(self, tokens: Tensor) -> Tensor:
        """[batch, time] token ids -> [batch, time, dim], what the first block is given."""
        return self._run(_Pass(None, 0, 0), input_ids=tokens)

    def all_channels(self, written: Tensor, tokens: Tensor) -> Tensor:  # noqa: ARG002 - as `Decoder.all_channels` is called
        """`written`: blocks of transformers' models write to all channels."""
        return written

    def documents(self, tokens: Tensor) -> Tensor | None:  # noqa: ARG002 - as `Decoder.documents` is called
        """None: transformers' models do not keep documents apart."""
        return None

    def through(self, x: Tensor, without: Collection[int] = (), documents: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """The blocks of the part but those left out: [batch, time, dim] -> [batch, time, dim]."""
        return self._run(_Pass(x, self._start, self._stop, without), inputs_embeds=torch.zeros_like(x))

    def loss(self, x: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
        """What is lost with targets, [batch, time] token ids, if the last block gives x: see `summed_loss`."""
        logits = self._run(_Pass(x, self.config.layers, None), inputs_embeds=torch.zeros_like(x))
        return loss_of(logits, targets, z_loss)

    def _run(self, now: _Pass, **inputs: Tensor) -> Tensor:
        self._now = now
        try:
            logits: Tensor = self.whole(**inputs, use_cache=False).logits
        except _Ended as ended:
            return ended.x
        return logits

    def _block(self, index: int, compute: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The forward of a block, present or not."""
        x, args, options = _split(args, options)
        new, start, stop, without = self._now
        if index == stop:
            raise _Ended(x)
        if index >= start:
            x = x if index > start or new is None else new
            if index not in without:
                result = compute(x, *args, **options)
                x = result[0] if isinstance(result, tuple) else result
            if index + 1 == stop:
                raise _Ended(x)
        elif new is not None and index + 1 == self.config.layers:
            x = new
        return (x,) if self._tuples else x

    @torch.no_grad()
    def _check(self, ends: bool) -> None:
        """Check that this model is the same in parts, by two texts that differ. Raises PierError."""
        one, other = (self._looked_at(ends, number) for number in (0, 1))
        if len(one) != len(other) or not all(map(torch.equal, one, other)):
            raise _indivisible(self.config, "its blocks are given more of the text than activations")

    def _looked_at(self, ends: bool, number: int) -> list[Tensor]:
        """What a block is given besides activations, with two tokens of that number or two vectors that are full of it.

        Parameters may be undefined yet, so only kinds and shapes of what is computed are looked at.
        """
        found: list[Tensor] = []
        shape, blocks = (1, 2, self.config.dim), [*self.blocks.values()]
        device = next(self.parameters()).device

        def look(compute: Callable[..., Any], *args: Any, **options: Any) -> Any:
            x, more, named = _split(args, options)
            found.extend(_tensors([*more, *named.values()]))
            result = compute(x, *more, **named)
            self._tuples = isinstance(result, tuple)
            made = [*_tensors(result if isinstance(result, tuple) else [result])]
            if len(made) != 1 or {x.shape, made[0].shape} != {shape}:
                raise _indivisible(self.config, "its blocks hand on more than one vector a token")
            raise _Ended(x)

        before = blocks[0].forward
        blocks[0].forward = partial(look, blocks[self._start].forward)
        try:
            text = torch.full(shape[:2], number, device=device) if ends else None
            vectors = None if ends else torch.full(shape, float(number), device=device)
            self.whole(input_ids=text, inputs_embeds=vectors, use_cache=False)
        except _Ended:
            return found
        finally:
            blocks[0].forward = before
        raise _indivisible(self.config, "its first block is not called")


def _split(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """The activations that a block is called with, and what else."""
    if args:
        return args[0], args[1:], options
    return options["hidden_states"], (), {key: it for key, it in options.items() if key != "hidden_states"}


def _bypass(module: nn.Module) -> None:
    """Let a module whose parameters are not in the part give zeros, or what it is given."""
    if not module._parameters:
        return
    if isinstance(module, nn.Embedding):
        width = module.embedding_dim
        vars(module)["forward"] = lambda ids, *_, **__: torch.zeros(*ids.shape, width, device=ids.device)
    else:
        vars(module)["forward"] = lambda x, *_, **__: x


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _indivisible(config: ModelSection, why: str) -> PierError:
    return PierError(
        f"a {config.name} cannot be divided into stages: {why}",
        "Leave out pipeline.stages: sites then train the whole model, each on all of its GPUs (--parallel fsdp).",
    )
