"""A decoder-only transformer in two forms, complete or a range of its blocks, with a KV cache, and what it generates.

llama: rotary positions, RMSNorm, SwiGLU, no biases, grouped-query heads (Touvron et al., arXiv 2307.09288).
gpt2: learned positions, LayerNorm, tanh-approximate GELU, biases (Radford et al. 2019).

It has no buffers: after it is built on the meta device, `to_empty` and `Layout.load` complete it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.trainer.model.initial import fixed_embedding, with_fixed
from pier_node.trainer.model.loss import LogitGradient, summed_loss

if TYPE_CHECKING:
    from pier_node.trainer.model.hub import HubDecoder

GROWTH = 256
"""Smallest number of tokens that a KV cache gets room for."""


class LayerPast:
    """The KV cache of one block: keys and values, [1, kv_heads, room, head_dim] each; `length` positions are set.

    The room grows with the text, up to the context.
    """

    def __init__(self, config: ModelSection, device: torch.device) -> None:
        self._context = config.context
        shape = (1, config.kv_heads, min(GROWTH, config.context), config.dim // config.heads)
        self._keys, self._values = (torch.empty(shape, device=device) for _ in range(2))
        self.length = 0

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, [1, kv_heads, tokens, head_dim]. Returns all that are known."""
        end = self.length + keys.shape[2]
        if end > self._keys.shape[2]:
            more = min(max(end, 2 * self._keys.shape[2]), self._context) - self._keys.shape[2]
            self._keys, self._values = (functional.pad(old, (0, 0, 0, more)) for old in (self._keys, self._values))
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class Past:
    """The KV cache of a complete decoder for one text; at most 8 · layers · context · dim · kv_heads / heads bytes."""

    def __init__(self, config: ModelSection, device: torch.device, blocks: Iterable[int] | None = None) -> None:
        names = range(config.layers) if blocks is None else blocks
        self._layers = {str(index): LayerPast(config, device) for index in names}
        self._context = config.context

    def layer(self, name: str) -> LayerPast:
        """The cache of a block, by its name in Decoder.blocks."""
        return self._layers[name]

    @property
    def length(self) -> int:
        """Number of tokens in the cache."""
        return next(iter(self._layers.values())).length

    def begin(self, tokens: int) -> int:
        """The position at which that many new tokens begin. Raises ValueError: there is no room for them."""
        if self.length + tokens > self._context:
            raise ValueError(f"{self.length + tokens} tokens do not fit into a context of {self._context}")
        return self.length

    def clear(self) -> None:
        """Empty the cache."""
        for layer in self._layers.values():
            layer.length = 0


EPSILON = 1e-5
"""Epsilon of both kinds of norm."""


class Decoder(nn.Module):
    """Maps token ids to logits. A range of the blocks takes or returns activations where it lacks an end.

    Args:
        config: the [model] section.
        blocks: consecutive blocks to build; None: all. Token and position embeddings belong to block 0, the final norm
            and the head to the last block. With tied embeddings, the range with the last block also has an
            `embedding.weight`, and the code that splits the model must add up the two gradients.
        ends: whether to build embeddings, final norm and head, wherever the blocks are: for a pipeline's stage, which
            is used through its parts (`embed`, `through`, `predict`); None: depending on the blocks.
    """

    def __init__(self, config: ModelSection, blocks: range | None = None, ends: bool | None = None) -> None:
        super().__init__()
        blocks = range(config.layers) if blocks is None else blocks
        self.config = config
        self.embeds = 0 in blocks if ends is None else ends
        self.predicts = config.layers - 1 in blocks if ends is None else ends
        self._angles: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._fixed: dict[torch.device, Tensor] = {}
        self.separator: int | None = None  # of documents that do not see each other: see `documents`
        self.logit_gradient: LogitGradient | None = None  # compiled, if trainer/replica.py does so
        self.bf16_stream = False  # whether blocks add their results to a residual stream in bf16
        self.sequence_parts = 1  # trainer/sharding.py divides the positions between blocks among workers
        if self.embeds or (self.predicts and config.tie_embeddings):
            self.embedding = _embedding(config.vocab_size, config.written)
        if self.embeds and config.form == "gpt2":
            self.positions = _embedding(config.context, config.dim)
        self.blocks = nn.ModuleDict({str(index): Block(config) for index in blocks})
        if self.predicts:
            self.norm = _norm(config)
        if self.predicts and not config.tie_embeddings:
            self.head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(
        self, x: Tensor, past: Past | None = None, targets: Tensor | None = None, z_loss: float = 0.0
    ) -> Tensor:
        """[batch, time] token ids, or [batch, time, dim] -> [batch, time, vocab] logits, or [batch, time, dim].

        With a `past`, the tokens follow those in it, which are not computed again; the new ones are added to it. With
        `targets`, [batch, time] token ids, the result is their `summed_loss`.
        """
        start = past.begin(x.shape[1]) if past else 0
        documents = self.documents(x) if self.embeds and past is None else None
        x = self.embed(x, start) if self.embeds else x
        x = self.through(x.bfloat16() if self.bf16_stream else x, past=past, start=start, documents=documents)
        if targets is not None:
            return self.loss(x, targets, z_loss)
        return self.predict(x) if self.predicts else x

    def join_products(self) -> None:
        """Have attention compute query, key and value in one product: faster where a compiler copies weights anyway."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.joint = True

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """[batch, time] token ids -> [batch, time, dim]; `start`: number of tokens before them."""
        x: Tensor = self.embedding(tokens)
        if self.config.form == "gpt2":
            x = x + self.positions(torch.arange(start, start + tokens.shape[1], device=tokens.device))
        return self.all_channels(x, tokens)

    def all_channels(self, written: Tensor, tokens: Tensor) -> Tensor:
        """The residual stream, [batch, time, dim], from what blocks write to it, [batch, time, subspace or dim]."""
        if not self.config.subspace:
            return written
        if written.device not in self._fixed:
            self._fixed[written.device] = fixed_embedding(self.config).to(written.device)
        return with_fixed(written, self._fixed[written.device][tokens])

    def documents(self, tokens: Tensor) -> Tensor | None:
        """[batch, time] token ids -> which tokens each token sees, [batch, 1, time, time]; None: all before it.

        With a `separator`, which begins a document, it sees those of its own document. Positions go on.
        """
        if self.separator is None:
            return None
        number = (tokens == self.separator).cumsum(dim=1)
        return (number[:, :, None] == number[:, None, :]).tril()[:, None]

    def through(
        self,
        x: Tensor,
        without: Collection[int] = (),
        past: Past | None = None,
        start: int = 0,
        documents: Tensor | None = None,
    ) -> Tensor:
        """The blocks, except `without`: [batch, time, dim] -> [batch, time, dim]; `start`: positions before them."""
        rotation = self._rotation(x, start) if self.config.form == "llama" else None
        for name, block in self.blocks.items():
            if not without or int(name) not in without:
                x = block(x, rotation, past.layer(name) if past else None, documents)
        return x

    def predict(self, x: Tensor) -> Tensor:
        """[batch, time, dim] -> [batch, time, vocab] logits."""
        return functional.linear(self.norm(x), self._head)

    def loss(self, x: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
        """What `predict` loses with these targets, [batch, time] token ids: see `summed_loss`."""
        return summed_loss(self.norm(x), self._head, targets, z_loss, self.logit_gradient)

    @property
    def _head(self) -> Tensor:
        return (self.embedding if self.config.tie_embeddings else self.head).weight

    def _rotation(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        end = start + x.shape[1] * self.sequence_parts
        if x.device not in self._angles:
            self._angles[x.device] = self._all_angles(x.device)
        cos, sin = self._angles[x.device]
        return cos[start:end], sin[start:end]  # [time, head_dim] each

    def _all_angles(self, device: torch.device) -> tuple[Tensor, Tensor]:
        head_dim = self.config.dim // self.config.heads
        even = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
        speed = 1.0 / self.config.rope_theta ** (even / head_dim)  # [head_dim / 2]
        places = torch.arange(self.config.context, device=device, dtype=torch.float32)
        angle = torch.outer(places, speed).repeat(1, 2)
        return angle.cos(), angle.sin()


class Block(nn.Module):
    """Attention, then the feed-forward part, each on a normed copy of the residual stream."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = SwiGLU(config) if config.form == "llama" else GELU(config)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        past: LayerPast | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """[batch, time, dim] -> [batch, time, dim]; see `Decoder.documents`."""
        x = _added(x, self.attention(self.attention_norm(x), rotation, past, documents=documents))
        return _added(x, self.mlp(self.mlp_norm(x)))


def _added(x: Tensor, change: Tensor) -> Tensor:
    """Add to the channels that blocks write to: those of a subspace come first."""
    fixed = x.shape[-1] - change.shape[-1]
    return x + (functional.pad(change, (0, fixed)) if fixed else change)


class Attention(nn.Module):
    """Causal attention; each key and value head serves heads / kv_heads query heads."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        bias = config.form == "gpt2"
        self.head_dim = config.dim // config.heads
        self.grouped = config.kv_heads != config.heads
        self.query = nn.Linear(config.dim, config.dim, bias=bias)
        self.key = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=bias)
        self.value = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=bias)
        self.output = nn.Linear(config.dim, config.written, bias=bias)
        self.joint = False  # see Decoder.join_products

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        past: LayerPast | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """[batch, time, dim] -> [batch, time, dim]; see `Decoder.documents`."""
        query, key, value = map(self._split, self._projected(x))
        if rotation is not None:
            query, key = _rotate(query, rotation), _rotate(key, rotation)
        mask = documents
        if past is not None:
            key, value = past.extended(key, value)
            mask = _later(query.shape[2], key.shape[2], x.device)
        x = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=past is None and documents is None, enable_gqa=self.grouped
        )
        merged: Tensor = self.output(x.transpose(1, 2).flatten(2))
        return merged

    def _projected(self, x: Tensor) -> Sequence[Tensor]:
        parts = self.query, self.key, self.value
        if not self.joint:
            return [part(x) for part in parts]
        weight = torch.cat([part.weight for part in parts])
        bias = None if self.query.bias is None else torch.cat([part.bias for part in parts])
        return torch.split(functional.linear(x, weight, bias), [part.out_features for part in parts], dim=-1)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)  # [batch, heads, time, head_dim]


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.written, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, dim] -> [batch, time, dim]."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class GELU(nn.Module):
    """down(gelu(up x)), with the tanh approximation."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.ffn_dim)
        self.down = nn.Linear(config.ffn_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, dim] -> [batch, time, dim]."""
        out: Tensor = self.down(functional.gelu(self.up(x), approximate="tanh"))
        return out


class RMSNorm(nn.RMSNorm):
    """PyTorch's, which is computed in fp32, but of a bf16 stream nothing is kept in fp32, as autocast would have it."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        if x.dtype == torch.float32:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.LayerNorm):
    """As RMSNorm above."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        if x.dtype == torch.float32:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def _norm(config: ModelSection) -> nn.Module:
    return (RMSNorm if config.form == "llama" else LayerNorm)(config.dim, eps=EPSILON)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    # Hugging Face's convention: dimension i rotates with dimension i + head_dim / 2, not with its neighbour.
    cos, sin = rotation
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).type_as(x)


def _later(tokens: int, known: int, device: torch.device) -> Tensor:
    """Attention mask of the last `tokens` of `known`: [tokens, known], bool."""
    return torch.ones(tokens, known, dtype=torch.bool, device=device).tril(known - tokens)


def _embedding(rows: int, dim: int) -> nn.Embedding:
    # Its own initialisation would import PyTorch's compiler on the meta device, which takes a second at every start.
    return nn.Embedding(rows, dim, _weight=torch.rand(rows, dim))


@torch.no_grad()
def stream(
    model: Decoder | HubDecoder,
    prompt: Sequence[int],
    count: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[int]:
    """The `count` tokens that follow `prompt`, each as soon as it is known.

    Args:
        model: a complete one; it sees the last `context` tokens.
        prompt: at least one token.
        count: number of tokens to generate.
        temperature: 0 always takes the likeliest token; 1 samples from the model's own distribution.
        top_k: sample among that many likeliest tokens; 0: among all.
        seed: the same seed gives the same tokens.

    Raises:
        PierError: the prompt is empty, or has a token that the model lacks; or what the model predicts is not finite.
    """
    if not prompt:
        raise PierError("the prompt is empty", "Give at least one character to go on from.")
    if max(prompt) >= model.config.vocab_size:
        raise PierError(
            f"the prompt has the token {max(prompt)}, the model knows {model.config.vocab_size}",
            "Leave out what is special in the prompt, or use the tokenizer that the model was trained with.",
        )
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        window = torch.tensor([tokens[-model.config.context :]], device=device)  # [1, time]
        logits = model(window)[0, -1].float().cpu()  # [vocab]
        if not logits.isfinite().all():
            raise PierError("the model predicts nan or inf: its training has diverged", "Use an earlier checkpoint.")
        tokens.append(_pick(logits, temperature, top_k, generator))
        yield tokens[-1]


def _pick(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature < torch.finfo(torch.float32).tiny:  # to divide by it would give nan
        return int(logits.argmax())
    if top_k:
        least = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # Subtracting the maximum first prevents overflow at temperatures near 0.
    chances = torch.softmax((logits - logits.max()) / temperature, dim=-1)
    return int(torch.multinomial(chances, 1, generator=generator))
