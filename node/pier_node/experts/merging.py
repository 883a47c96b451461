"""Experts of equal shape as one model, in which a router picks feed-forward parts for each token.

Embedding, attention, norms and head are the mean of the experts'. The feed-forward part of each expert becomes one of K
in its layer (Branch-Train-MiX, arXiv 2403.07816). With h a token's normed activation [dim] and R the layer's router
[K, dim], a layer computes as Mixtral does (arXiv 2401.04088, section 2.1), with p renormalised over what is picked:

    p = softmax(R h),    Σ_j p_j · FFN_j(h) / Σ_j p_j    over the `active` largest p_j

`inform` sets the routers without training, from what each domain alone can tell (after FlexOlmo, arXiv 2507.07024,
whose row j is the mean embedding of domain j). Here the rows are those of the linear discriminant that tells the
domains apart: with mean μ_j of h over domain j, M the mean of h hᵀ over all of them, and S = M - mean_j μ_j μ_jᵀ,

    R_j = S⁻¹ μ_j - ½ (μ_jᵀ S⁻¹ μ_j) · t,    t = M⁻¹ mean_j μ_j

where t stands for the constant that a router has no room for: t·h is as near to 1 as a linear function of h can be.
`tune` then trains the routers, or all weights, on a little of every domain. Row j belongs to expert j alone: without it
(`without`), that expert is never picked.

The files are those of `MixtralForCausalLM`, which transformers loads without code of ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.trainer.data.corpus import Batch, Windows
from pier_node.trainer.model.cost import flops_per_token
from pier_node.trainer.model.decoder import Block, Decoder, SwiGLU
from pier_node.trainer.model.export import Rule, from_config, read_json, rules, stored, to_config, write_model

KIND = "mixtral"
NAMES = "pier_experts"
"""Key of config.json: the domains of the experts, in order; transformers ignores it."""
MOST = 64
"""Maximum number of experts in a layer."""
ROUTER_LR, LR = 1e-2, 1e-3
"""Learning rates of `tune`, for the routers alone and for all weights: chosen with one seed of bench/merging.py, on the
rows that mixtures fit their prior on."""
RIDGE = 1e-3
"""Added to the diagonals of S and M, as a fraction of the mean of M's, so that they can be inverted."""


class SparseFeedForward(nn.Module):
    """A layer's router and its K feed-forward parts."""

    def __init__(self, config: ModelSection, experts: int, active: int) -> None:
        super().__init__()
        self.active = active
        self.router = nn.Linear(config.dim, experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(config) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, dim] -> [batch, time, dim]."""
        flat = x.flatten(0, 1)
        shares, picked = self.router(flat).float().softmax(dim=-1).topk(self.active)  # [tokens, active] each
        shares = (shares / shares.sum(dim=-1, keepdim=True)).type_as(x)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            tokens, rank = torch.where(picked == index)
            if len(tokens):
                out = out.index_add(0, tokens, expert(flat[tokens]) * shares[tokens, rank, None])
        return out.view_as(x)


class MergedDecoder(Decoder):
    """A decoder whose feed-forward parts are those of experts.

    Attributes:
        names: of the experts, in the order of their rows.
        active: experts that compute for a token, in every layer.
    """

    def __init__(self, config: ModelSection, names: Sequence[str], active: int) -> None:
        super().__init__(config)
        self.names, self.active = (*names,), active
        for block in self.blocks.values():
            block.mlp = SparseFeedForward(config, len(names), active)

    @property
    def flops(self) -> float:
        """FLOPs of predicting a token."""
        config = self.config
        more = (self.active - 1) * 3 * config.ffn_dim + len(self.names)
        return flops_per_token(config) / 3 + 2.0 * config.layers * config.dim * more

    @torch.no_grad()
    def inform(self, texts: Mapping[str, npt.NDArray[np.integer[Any]]]) -> None:
        """Set the routers from what each expert's domain alone can tell, layer by layer; see the module.

        Args:
            texts: token ids of each expert's domain, [rows, tokens].
        """
        device = self.embedding.weight.device
        streams = [self.embed(torch.from_numpy(texts[name].astype(np.int64)).to(device)) for name in self.names]
        for block in self.blocks.values():
            assert isinstance(block, Block)
            assert isinstance(block.mlp, SparseFeedForward)
            streams = [x + block.attention(block.attention_norm(x), self._rotation(x)) for x in streams]
            normed = [block.mlp_norm(x) for x in streams]
            block.mlp.router.weight.copy_(discriminant([h.flatten(0, 1).double() for h in normed]))
            streams = [x + block.mlp(h) for x, h in zip(streams, normed)]


def merge(experts: Mapping[str, Decoder], active: int) -> MergedDecoder:
    """The experts, by name, as one model with weights of its own.

    Its routers are 0: `active` experts compute for each token, in equal parts.

    Raises:
        PierError: they are not of one shape, are too few or too many, or not of the llama form.
    """
    names, config = [*experts], _common({name: expert.config for name, expert in experts.items()})
    if not 1 <= active <= len(names):
        raise PierError(f"--active {active}: there are {len(names)} experts", "Give a number from 1 to that.")
    states = [expert.state_dict() for expert in experts.values()]
    routers = torch.zeros(config.layers, len(names), config.dim, device=states[0]["embedding.weight"].device)
    state = {f"blocks.{layer}.mlp.router.weight": router for layer, router in enumerate(routers.unbind())}
    for name in states[0]:
        if ".mlp." in name:
            for index, own in enumerate(states):
                state[name.replace(".mlp.", f".mlp.experts.{index}.")] = own[name].clone()
        else:
            state[name] = torch.stack([own[name] for own in states]).mean(dim=0)
    return _filled(_undefined(config, names, active), state)


def _common(configs: Mapping[str, ModelSection]) -> ModelSection:
    """The configuration of all experts. Raises PierError: there is none."""
    if not 2 <= len(configs) <= MOST:
        raise PierError(f"{len(configs)} experts cannot be merged", f"A merged model has 2 to {MOST} experts.")
    (first, config), *others = configs.items()
    if config.form != "llama":
        raise PierError(
            f"the expert of {first} has the form {config.form}, for which there is no merged one",
            "Serve the experts as an ensemble: pier-node serve --experts.",
        )
    for name, other in others:
        for key, value in config.model_dump(exclude={"preset"}).items():
            if (unlike := getattr(other, key)) != value:
                raise PierError(
                    f"the experts of {first} and {name} have unlike shapes: {key} = {value} and {unlike}",
                    "Serve them as an ensemble (pier-node serve --experts), or plan experts of one size: "
                    'heterogeneity = "MHo-IHo" or "MHo-IHe" in experts.toml.',
                )
    return config


def _undefined(config: ModelSection, names: Sequence[str], active: int) -> MergedDecoder:
    with torch.device("meta"):
        return MergedDecoder(config, names, active)


def _filled(model: MergedDecoder, state: Mapping[str, Tensor]) -> MergedDecoder:
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def without(model: MergedDecoder, name: str) -> MergedDecoder:
    """The model without an expert: its rows and feed-forward parts are gone, and nothing else changes.

    The mean of embedding and attention still contains what that expert has learned: to be rid of it, merge the others.

    Raises:
        PierError: there is no such expert, or only one other.
    """
    if name not in model.names:
        raise PierError(f"there is no expert of {name} in the model", f"It has: {', '.join(model.names)}.")
    kept = [index for index, each in enumerate(model.names) if each != name]
    if len(kept) < 2:
        raise PierError(f"without {name} there is one expert left", "Use that one by itself.")
    state: dict[str, Tensor] = {}
    for key, tensor in model.state_dict().items():
        if key.endswith(".mlp.router.weight"):
            state[key] = tensor[kept]
        elif ".mlp.experts." not in key:
            state[key] = tensor
        else:
            head, _, tail = key.partition(".mlp.experts.")
            number, _, rest = tail.partition(".")
            if int(number) in kept:
                state[f"{head}.mlp.experts.{kept.index(int(number))}.{rest}"] = tensor
    names = [model.names[index] for index in kept]
    return _filled(_undefined(model.config, names, min(model.active, len(kept))), state)


def discriminant(samples: Sequence[Tensor]) -> Tensor:
    """The rows of a router that tells the samples apart, fp64 [samples, dim]; a sample is fp64 [tokens, dim]."""
    means = torch.stack([h.mean(dim=0) for h in samples])  # [K, dim]
    moments = torch.stack([h.T @ h / len(h) for h in samples]).mean(dim=0)
    ridge = RIDGE * moments.diagonal().mean() * torch.eye(len(moments), device=moments.device, dtype=moments.dtype)
    spread = moments - means.T @ means / len(means)
    rows: Tensor = torch.linalg.solve(spread + ridge, means.T).T
    one: Tensor = torch.linalg.solve(moments + ridge, means.mean(dim=0))
    return rows - 0.5 * (rows * means).sum(dim=1, keepdim=True) * one


def batches(texts: Collection[Windows], steps: int) -> Iterator[Batch]:
    """A window of each text for every step."""
    for step in range(steps):
        inputs, targets = zip(*(text.batch(step, 1) for text in texts))
        yield np.concatenate(inputs), np.concatenate(targets)


def tune(
    model: Decoder,
    batches: Iterable[Batch],
    steps: int,
    lr: float,
    routers_only: bool,
    done: Callable[[int], None] = lambda _steps: None,
) -> None:
    """Train with AdamW; the learning rate falls from `lr` to 0 along a cosine.

    Args:
        batches: token ids and targets, [rows, context] each; one pair for each step.
        done: called with the number of further steps.
    """
    named = model.named_parameters()
    trained = [weight for name, weight in named if not routers_only or name.endswith(".router.weight")]
    for weight in trained:
        weight.requires_grad_(True)
    optimizer, device = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0), trained[0].device
    for step, (inputs, targets) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = model(torch.from_numpy(inputs).to(device), targets=torch.from_numpy(targets).to(device)) / targets.size
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        done(1)
    model.requires_grad_(False)


def save(model: MergedDecoder, folder: Path, tokenizer: str) -> Path:
    """Write the model for `from_pretrained`, as `export` does. Raises PierError."""
    return write_model(folder, _content(model), _rules(model), model.state_dict(), tokenizer)


def is_merged(folder: Path) -> bool:
    """Whether a folder holds what `save` wrote."""
    about = folder / "config.json"
    return about.is_file() and NAMES in (content := read_json(about)) and content.get("model_type") == KIND


def empty(folder: Path) -> MergedDecoder:
    """The model that `save` wrote, without its weights: on the meta device. Raises PierError."""
    content = read_json(folder / "config.json")
    names, active = content.get(NAMES), content.get("num_experts_per_tok")
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names) and 2 <= len(names) <= MOST):
        raise PierError(f"{folder}: config.json: {NAMES} = {names!r}", _AGAIN)
    if not (isinstance(active, int) and 1 <= active <= len(names)):
        raise PierError(f"{folder}: config.json: num_experts_per_tok = {active!r}", _AGAIN)
    return _undefined(from_config({**content, "model_type": "llama"}), names, active)


def load(folder: Path) -> MergedDecoder:
    """Read a merged model back, fp32. Raises PierError: it is damaged, or not what `save` wrote."""
    model = empty(folder)
    wanted, state = {rule.theirs: rule.ours[0] for rule in _rules(model)}, dict[str, Tensor]()
    try:
        for name, tensor in stored(folder):
            state[wanted[name]] = tensor.float()
        return _filled(model, state)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise PierError(f"{folder}: the weights do not fit config.json: {error}", _AGAIN) from error


_AGAIN = "Write the folder again with: pier-node merge"
_PARTS = {"gate": "w1", "down": "w2", "up": "w3"}


def _rules(model: MergedDecoder) -> list[Rule]:
    """One rule for each of Mixtral's tensors."""
    found = [rule for rule in rules(model.config) if ".mlp." not in rule.theirs]
    for layer in range(model.config.layers):
        theirs, ours = f"model.layers.{layer}.block_sparse_moe", f"blocks.{layer}.mlp"
        found.append(Rule(f"{theirs}.gate.weight", (f"{ours}.router.weight",)))
        for index in range(len(model.names)):
            for own, other in _PARTS.items():
                found.append(
                    Rule(f"{theirs}.experts.{index}.{other}.weight", (f"{ours}.experts.{index}.{own}.weight",))
                )
    return found


def _content(model: MergedDecoder) -> dict[str, Any]:
    """The content of config.json."""
    llama = to_config(model.config)
    for key in ("attention_bias", "mlp_bias", "rope_scaling"):
        del llama[key]
    return {
        **llama,
        "architectures": ["MixtralForCausalLM"],
        "model_type": KIND,
        "num_local_experts": len(model.names),
        "num_experts_per_tok": model.active,
        "sliding_window": None,
        "output_router_logits": False,
        NAMES: list(model.names),
    }
