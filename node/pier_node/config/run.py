"""run.toml -> RunConfig: what every site of a run agrees on, its canonical form and its hash.

Settings of one site (addresses, devices, data directory) are flags of `pier-node start`, never part of the run.

The [pipeline] section follows SkipPipe (arXiv 2502.19913). `config_changes` lists the differences between two
configurations of a run, key by key, for people who changed run.toml by mistake.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from pier_node.base.errors import PierError
from pier_node.base.toml import Fraction, PositiveInt, Section, read_toml, validated
from pier_node.config.presets import PRESETS, TOKENIZER
from pier_node.config.pretrained import TransformersSection, block_of
from pier_node.config.program import ProgramSection, outer_of_program

log = logging.getLogger(__name__)

SITES = 1024
"""Most sites of a run."""
LATER = "later"
"""Marks a key that was added when there were runs already. While it has its default, the canonical form does without
it, so that the hash of a run that does not use it stays what it was."""


class PipelineSection(Section):
    """Section [pipeline]: the model in stages (docs/pipeline.md). Without [outer], replicas average at each step."""

    stages: Annotated[int, Field(ge=1, le=64)] = 1
    """Stages of consecutive blocks; a site holds one of them. 1: no pipeline, every site trains the whole model."""
    paths: Literal["full", "skip", "random"] = "skip"
    """full: a microbatch visits all stages. skip: some, on planned paths. random: on paths drawn anew in each step."""
    skip: Fraction = 0.25
    """Part of the stages that a microbatch does not visit, rounded to a whole number of stages."""
    full_end: Annotated[Fraction, LATER] = 0.0
    """Part of the iterations, at the end of the run, in which all microbatches visit all stages."""
    swaps: Annotated[int, Field(ge=0, le=8)] = 0
    """How often, at most, a path may visit a stage after a later one."""
    max_jump: Annotated[int, Field(ge=0, le=63), LATER] = 0
    """How many stages, at most, the next stage of a path may lie beyond the furthest so far: with 3, a path leaves out
    no more than two stages in a row, except at its end. 0: as many as paths leave out."""
    microbatches: Annotated[int, Field(ge=1, le=10_000)] = 8
    """Microbatches of an iteration, each of inner.batch_size sequences."""
    memory: Annotated[int, Field(ge=1, lt=10_000)] = 3
    """Most microbatches in flight that a site can hold."""
    activation_codec: Annotated[Literal["none", "bf16", "int8", "int4"], LATER] = "none"
    """How activations travel between stages; with none as they are computed, in fp32 or bf16. int8 costs no loss."""
    gradient_codec: Annotated[Literal["none", "bf16", "int8", "int4"], LATER] = "none"
    """How the gradients of activations travel back."""
    plan_seconds: Annotated[float, Field(gt=0, le=60)] = 2.0
    """Seconds that each search for paths may take."""

    @property
    def path_length(self) -> int:
        """L, the number of stages that a microbatch visits, the first one included."""
        return self.stages if self.paths == "full" else max(round(self.stages * (1 - self.skip)), min(self.stages, 2))


def outer_of_pipeline(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables of a run.toml, with defaults that follow from [pipeline] if [outer] is missing or incomplete.

    No site of a pipeline can start alone, so Pier's start is a synchronous one.
    """
    section, outer = tables.get("pipeline"), tables.get("outer")
    if not isinstance(section, dict) or section.get("stages", 1) in (0, 1):
        return tables
    if outer is None:
        return {**tables, "outer": {"algorithm": "sync"}}
    if isinstance(outer, dict) and outer.get("algorithm", "pier") == "pier":
        return {**tables, "outer": {"start": "sync", **outer}}
    return tables


def jump_flaw(section: PipelineSection) -> str:
    """Why no paths have jumps that short, or jumps at all; "" if there are such paths.

    A path of L of S stages that reaches the last one has L - 1 jumps over S - 1 stages together. If all of them have to
    be of full length, its stages are given, and hardly any paths visit all stages equally often.
    """
    stages, length, jump = section.stages, section.path_length, section.max_jump
    if jump and length == stages:
        return "pipeline.max_jump is for paths that leave stages out: leave it out"
    if jump and jump < (least := min((stages - 1) // (length - 1) + 1, stages - 1)):
        few = f"pipeline.max_jump = {jump}: paths of {length} of {stages} stages need jumps of at least {least}"
        return f"{few} to visit all stages equally often"
    return ""


def outer_flaw(outer: OuterSection) -> str:
    """What the replicas of a stage cannot do of [outer], and what to do instead; "" if there is nothing."""
    if outer.start == "solo":
        return 'outer.start = "solo": no site of a pipeline has the whole model: use "sync" or "none"'
    if outer.codec in SPARSE or (outer.codec != "none" and outer.algorithm == "sync"):
        return (
            f'outer.codec = "{outer.codec}" is not there for the stages of a pipeline with algorithm = '
            f'"{outer.algorithm}": use "none", or "int4" with another algorithm than "sync"'
        )
    for key in ("residual", "robust", "max_weight", "overlap", "fragments", "final_merge"):
        if getattr(outer, key) != OuterSection.model_fields[key].default:
            return f"outer.{key} = {getattr(outer, key)!r} is not there for the stages of a pipeline: leave it out"
    return ""


class RunSection(Section):
    """Section [run]: its name, and how many sites it waits for."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "run"
    """Name of the run."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Random seed of the initial weights, and of the order in which sites see their data."""
    pretrained: Annotated[bool, LATER] = False
    """Whether the run begins with the weights of a model, which its founder names with --from, and not with random
    ones. `pier-node init --from` sets it."""
    sites: Annotated[int, Field(ge=1, le=SITES)] = 1
    """Number of sites to wait for before the first exchange; the training data is split into as many parts."""
    witness: Annotated[bool, LATER] = False
    """Whether half of the sites continue without the others if the coordinator gives them its vote. Without it, of two
    sites only the one with the lower node id does. `pier-coordinator init` sets it."""


class ModelSection(Section):
    """Section [model]: a preset, and any of its keys changed."""

    preset: str = "llama-1m"
    """Named model. It sets defaults of other keys here; each can be changed."""
    form: Literal["llama", "gpt2", "transformers"] = "llama"
    """Architecture. Llama: RMSNorm, rotary positions, SwiGLU. GPT-2: LayerNorm, learned positions, GELU. transformers:
    that of [model.transformers], which `pier-node init --from` writes; of the other keys only context can be changed.
    """
    vocab_size: PositiveInt = 256
    """Vocabulary size of the model: at least that of the tokenizer. GPUs are faster with a multiple of 64."""
    dim: PositiveInt = 128
    """Width of the residual stream. A multiple of heads."""
    layers: PositiveInt = 4
    """Number of transformer blocks."""
    heads: PositiveInt = 4
    """Number of attention heads."""
    kv_heads: PositiveInt = 4
    """Number of key/value heads, each shared by a group of heads. Must divide heads. llama only."""
    ffn_dim: PositiveInt = 352
    """Hidden width of the feed-forward layer in a block."""
    context: PositiveInt = 256
    """Sequence length, in tokens."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """Base of the rotary position embedding. llama only."""
    tie_embeddings: bool = True
    """Whether the output layer shares its weights with the embedding."""
    subspace: Annotated[int, Field(ge=0), LATER] = 0
    """Channels of the residual stream that blocks write to; in the others every token keeps a fixed random embedding.
    0: all. The stages of a pipeline send each other these channels and the token ids, and nothing is lost. llama with
    tie_embeddings = false only."""
    transformers: Annotated[TransformersSection | None, LATER] = None
    """The model, if Pier's own decoder does not know it."""

    @property
    def name(self) -> str:
        """What people call the model: its preset, or the architecture that transformers knows it by."""
        return self.transformers.kind if self.transformers else self.preset

    @property
    def written(self) -> int:
        """Channels of the residual stream that blocks write to."""
        return self.subspace or self.dim

    @model_validator(mode="before")
    @classmethod
    def fill_from_preset(cls, keys: Any) -> Any:
        """Take keys that the table does not give from the preset."""
        if not isinstance(keys, dict):
            return keys
        preset = keys.get("preset", "llama-1m")
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(f"preset {preset!r} is unknown; allowed: {', '.join(PRESETS)}")
        merged: dict[str, Any] = {**PRESETS[preset], **keys}
        if "heads" in keys and "kv_heads" not in keys:
            merged["kv_heads"] = keys["heads"]
        return merged

    @model_validator(mode="after")
    def check_shapes(self) -> Self:
        """Refuse head counts that do not divide, except in models that transformers builds."""
        if (self.form == "transformers") is (self.transformers is None):
            raise ValueError('form = "transformers" and [model.transformers] need each other: use `init --from FOLDER`')
        if self.transformers:
            return self
        if self.dim % self.heads:
            raise ValueError(f"dim = {self.dim} must be a multiple of heads = {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}")
        if self.form == "gpt2" and self.kv_heads != self.heads:
            raise ValueError(f'form = "gpt2" has no grouped heads: kv_heads = {self.kv_heads} must be {self.heads}')
        if self.form == "llama" and (self.dim // self.heads) % 2:
            raise ValueError(f"dim / heads = {self.dim // self.heads} must be even for rotary positions")
        if self.subspace >= self.dim:
            raise ValueError(f"subspace = {self.subspace} must be less than dim = {self.dim}, or 0")
        if self.subspace and (self.form != "llama" or self.tie_embeddings):
            raise ValueError('subspace is for form = "llama" with tie_embeddings = false')
        return self


class SourceSection(Section):
    """Where text, or tokens, come from."""

    source: Literal["stdlib", "builtin", "text", "jsonl", "parquet", "hf", "tokens"] = "stdlib"
    """stdlib: the source of Python's standard library, which every machine has. builtin: see path. text, jsonl,
    parquet: files in that format. hf: a data set of the `datasets` library, which is streamed. tokens: what
    `pier-node tokenize` has written, or files .npy or .bin (nanoGPT, llm.c)."""
    path: str = ""
    """File or folder; with `builtin`, the name of a domain: topics, docstrings, network, formats, concurrency, numbers,
    encodings or tools; with `hf`, the name of a data set."""
    text_field: str = "text"
    """Field (jsonl) or column (parquet, hf) that holds the text."""
    subset: Annotated[str, LATER] = ""
    """With `hf`: the configuration of the data set, if it has several."""
    split: Annotated[str, LATER] = "train"
    """With `hf`: the split to read."""
    limit: Annotated[int, Field(ge=0), LATER] = 0
    """How many documents of the source to use, from the first one on; 0: all."""

    @model_validator(mode="after")
    def check_path(self) -> Self:
        """Require a path for every source except the built-in one."""
        if self.source != "stdlib" and not self.path:
            raise ValueError(f'source = "{self.source}" needs path = "FILE or FOLDER", or a domain')
        return self


class MixtureSection(SourceSection):
    """Table [[data.mixture]]: one of several sources that are mixed."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its part of the sequences of a batch, against the weights of the others; they need not add up to 1."""


class DataSection(SourceSection):
    """Section [data]: the text that all sites share and that is split among them. `--dataset` gives a site its own."""

    tokenizer: str = "bytes"
    """Either `bytes`, or the path of a tokenizer.json."""
    tokenizer_hash: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$"), LATER] = ""
    """SHA-256 of that file. A site that joins then gets the file from the others. Empty: each site must have the file,
    and nobody checks that all have the same."""
    validation: Annotated[float, Field(gt=0.0, le=0.5)] = 0.02
    """Fraction of the documents that no site trains on."""
    dealt: Annotated[bool, LATER] = True
    """Whether all sites have the same data, of which each trains on its part. false: each site has other data at the
    same path, and trains on all of it."""
    document_mask: Annotated[bool, LATER] = False
    """Whether a token sees only its own document in a sequence of several. The tokenizer must have a token that
    separates documents. Attention takes longer, and memory for context * context numbers per sequence."""
    mixture: Annotated[tuple[MixtureSection, ...], LATER] = ()
    """Several sources, mixed by weight, each a table [[data.mixture]]; then source and path are not set here."""

    @model_validator(mode="after")
    def check_mixture(self) -> Self:
        """Refuse a source beside those of a mixture."""
        if self.mixture and (self.source != "stdlib" or self.path):
            raise ValueError("a mixture names its sources: leave source and path out of [data]")
        return self

    @model_validator(mode="after")
    def check_tokenizer(self) -> Self:
        """Refuse a hash of no file, and to separate documents by a byte that is in them."""
        if self.tokenizer_hash and self.tokenizer == "bytes":
            raise ValueError('tokenizer_hash is of a tokenizer.json: leave it out with tokenizer = "bytes"')
        if self.document_mask and self.tokenizer == "bytes":
            raise ValueError('document_mask = true needs a tokenizer with an end-of-text token, not "bytes"')
        return self

    def parts(self) -> list[tuple[float, DataSection]]:
        """Each source with its weight, as if it were alone; the weights add up to 1."""
        if not self.mixture:
            return [(1.0, self)]
        total, own = math.fsum(part.weight for part in self.mixture), {"mixture": ()}
        return [
            (part.weight / total, self.model_copy(update={**part.model_dump(exclude={"weight"}), **own}))
            for part in self.mixture
        ]


class InnerSection(Section):
    """Section [inner]: training inside a site."""

    total_steps: PositiveInt = 1000
    """T, the number of inner steps in the whole run."""
    batch_size: PositiveInt = 8
    """Sequences that a site trains on in one inner step, over all its workers."""
    micro_batch: Annotated[int, Field(ge=0)] = 0
    """Sequences that a worker computes at once; 0: its whole share (no gradient accumulation)."""
    optimizer: Annotated[Literal["adamw", "muon", "sgd"], LATER] = "adamw"
    """How weights follow gradients. muon: Muon for the matrices inside the blocks, AdamW for all other parameters, with
    one learning rate for both: AdamW's for large models, several times that for small ones. sgd: stochastic gradient
    descent with momentum. In synchronous rounds the daemon takes the step on its CPU, where muon's takes seconds with
    more than 100 million parameters."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate, after the warmup."""
    min_lr: Annotated[float, Field(ge=0)] = 1e-4
    """Learning rate at the end of the run."""
    schedule: Annotated[Literal["cosine", "wsd"], LATER] = "cosine"
    """How the learning rate falls after the warmup. cosine: all the way to the end. wsd (warmup, stable, decay): it
    stays, and falls in the last part of the run."""
    decay_fraction: Annotated[float, Field(gt=0, le=1), LATER] = 0.2
    """With wsd, the part of the run in which the learning rate falls; cosine ignores it."""
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    """Number of inner steps over which the learning rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay, applied to matrices only."""
    beta1: Fraction = 0.9
    """Decay rate of AdamW's first moment."""
    beta2: Fraction = 0.999
    """Decay rate of AdamW's second moment."""
    momentum: Annotated[Fraction, LATER] = 0.95
    """Decay rate of the momentum of Muon and of sgd; adamw ignores it."""
    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """The global gradient norm is clipped to this; 0: never."""
    z_loss: Annotated[float, Field(ge=0), LATER] = 0.0
    """Coefficient of the z-loss, which keeps logits from drifting; 1e-4 is usual. Validation leaves it out."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of inner steps. auto: bf16 if the GPU supports it. Weights are always fp32."""
    residual_stream: Annotated[Literal["auto", "bf16"], LATER] = "auto"
    """Precision of what blocks add their results to, if inner steps are in bf16. auto: fp32, but bf16 where workers
    share the model (fsdp, hsdp). bf16: everywhere, which saves memory. Pier's own decoder only."""
    compile: Literal["auto", True, False] = "auto"
    """Whether to use torch.compile, which makes steps faster and the start a minute longer. auto: for Pier's own
    decoder from 10 million parameters on, on a GPU, if there is a C compiler."""
    eval_every: Annotated[int, Field(ge=0)] = 5
    """Outer rounds between validations; 0: only at the end."""
    eval_batches: PositiveInt = 4
    """Number of batches in a validation."""

    @model_validator(mode="after")
    def check_rates(self) -> Self:
        """Refuse a learning rate that would rise instead of fall."""
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr:g} must not be above lr = {self.lr:g}")
        return self


class NolocoSection(Section):
    """Section [outer.noloco]: the outer step of algorithm = "noloco"; other algorithms ignore it."""

    alpha: Fraction = 0.5
    """Outer momentum α; each site keeps its own momentum."""
    beta: Annotated[float, Field(ge=0)] = 0.7
    """Outer learning rate β. With γ = β a site sends only its weights; otherwise also its anchor."""
    gamma: Annotated[float, Field(ge=0)] = 0.7
    """Pull γ of a site to the mean anchor of its pair; around 0.3 replicas converge to each other fastest."""

    @model_validator(mode="after")
    def check_stability(self) -> Self:
        """Refuse a γ with which replicas drift apart; the limit holds for pairs in a run of any size.

        It follows from the outer step (arXiv 2506.10911, Eq. 2), and tests/outer/stability.py derives it. The bound
        that the paper prints (Eq. 74) is neither necessary nor sufficient.
        """
        if self.gamma >= (limit := 2 * (1 - self.alpha**2)):
            raise ValueError(
                f"gamma = {self.gamma:g} must be below 2(1 - alpha²) = {limit:.4g} for alpha = {self.alpha:g}: "
                "from there on the replicas of pairs drift apart without end"
            )
        return self


SPARSE = ("topk", "topk2")
"""Codecs that send a few of the values."""
MOST_MOMENTUM = 0.5
"""The most outer momentum with such a codec that gives no warning."""


class OuterSection(Section):
    """Section [outer]: the exchange between sites. `algorithm` sets the defaults of the keys after it."""

    algorithm: Literal["pier", "diloco", "noloco", "sync"] = "pier"
    """How sites exchange updates. It sets defaults of other keys here; each can be changed."""
    inner_steps: PositiveInt = 50
    """H, the number of inner steps between outer rounds."""
    start: Literal["solo", "sync", "none"] = "solo"
    """First part of the run. solo: one site trains with the batch of all sites; sync: all sites train synchronously;
    none: there is no such part."""
    start_fraction: Fraction = 0.1
    """Part p of the run that the start takes."""
    momentum_warmup: bool = True
    """Whether the start accumulates outer momentum."""
    schedule: Literal["staged", "cosine", "constant", "anneal"] = "staged"
    """Schedule of the outer momentum and learning rate: the paper's steps, cosines, or constants; anneal: constants,
    which go to 0 and 1 in the last quarter of the run."""
    momentum: Fraction = 0.9
    """Outer momentum μ of the schedules constant and anneal, and of the momentum warmup."""
    lr: Annotated[float, Field(gt=0)] = 0.7
    """Outer learning rate η of the schedules constant and anneal."""
    codec: Literal["none", "bf16", "int8", "int4", "topk", "topk2"] = "none"
    """How values are encoded; a site keeps what a lossy codec drops and sends it later (error feedback). A top-k sets
    other defaults: schedule = "constant" with momentum = 0 and lr = 2."""
    density: Annotated[Literal[16, 32, 64, 128, 256], LATER] = 64
    """A top-k codec sends one value in this many."""
    error_decay: Annotated[float, Field(gt=0, le=1), LATER] = 1.0
    """The part of what a codec dropped that is sent later; below 1, old errors are forgotten."""
    residual: Annotated[Literal["fp32", "bf16"], LATER] = "fp32"
    """How a site keeps what a codec dropped: bf16 takes half the memory."""
    robust: Literal["none", "trimmed"] = "none"
    """With `trimmed`, each element of the mean uses the middle third of the weight, whatever the rest is."""
    max_weight: Annotated[float, Field(ge=1, le=SITES)] = 2.0
    """Largest weight of a site, as a multiple of the median of the members' tokens; or the tokens of `inner_steps` of
    training, if that is more."""
    overlap: bool = False
    """Workers continue to train while a round runs; they load its result when it is there, or at the end of the next
    inner steps if half of them are done by then."""
    fragments: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of parts of the model that are synced in turn, each every `inner_steps`."""
    adaptive_steps: bool = True
    """A slow site does fewer than `inner_steps`, so that all sites arrive together."""
    final_merge: bool = False
    """For noloco only: after the last round, all sites that are there take the mean of their models."""
    noloco: NolocoSection = NolocoSection()

    @model_validator(mode="before")
    @classmethod
    def fill_from_algorithm(cls, keys: Any) -> Any:
        """Take keys that the table does not give from the algorithm (arXiv 2511.17849, 2311.08105, 2506.10911).

        A top-k goes without outer momentum (arXiv 2508.15706), and twice as far, because what it sends comes late.
        """
        if not isinstance(keys, dict):
            return keys
        paper = keys.get("algorithm", "pier") == "pier"
        start = keys.get("start", "solo" if paper else "none")
        plain: dict[str, Any] = {} if paper else {"start": "none", "momentum_warmup": False, "schedule": "constant"}
        if keys.get("codec") in SPARSE:
            plain |= {"momentum_warmup": False, "schedule": "constant", "momentum": 0.0, "lr": 2.0}
        return {**plain, "start_fraction": 0.0 if start == "none" else 0.1, **keys}

    @model_validator(mode="after")
    def check_start(self) -> Self:
        """Require a start to take a part of the run, and refuse a start with synchronous training."""
        if self.algorithm == "sync" and self.start != "none":
            raise ValueError('algorithm = "sync" is synchronous from the first step to the last: leave start out')
        if self.start != "none" and self.start_fraction == 0.0:
            raise ValueError(f'start = "{self.start}" needs start_fraction > 0, or use start = "none"')
        return self

    @model_validator(mode="after")
    def check_fragments(self) -> Self:
        """Require that the inner steps of a round divide evenly among the fragments."""
        if self.inner_steps % self.fragments:
            raise ValueError(f"inner_steps = {self.inner_steps} must be a multiple of fragments = {self.fragments}")
        if self.algorithm == "sync" and (self.overlap or self.fragments > 1):
            raise ValueError('algorithm = "sync" exchanges whole gradients step by step: no overlap, no fragments')
        return self

    @model_validator(mode="after")
    def check_noloco(self) -> Self:
        """Refuse keys that would have no effect with noloco, or would need all sites at every step."""
        if self.algorithm != "noloco":
            if self.final_merge:
                raise ValueError('final_merge = true is for algorithm = "noloco": with others all sites end equal')
            return self
        if self.start == "sync":
            raise ValueError('start = "sync" needs every site at every step: use "solo" or "none" with noloco')
        if self.momentum_warmup or self.schedule != "constant":
            raise ValueError("noloco takes alpha, beta and gamma of [outer.noloco]: no momentum_warmup, no schedule")
        if self.robust != "none":
            raise ValueError(f'robust = "{self.robust}" is for the mean of many sites: noloco meets in pairs')
        if self.fragments > 1:
            raise ValueError("fragments > 1: pairs of noloco swap the whole model; overlap, or a codec, is for them")
        if self.codec in SPARSE:
            raise ValueError(f'codec = "{self.codec}" is for pseudo-gradients: pairs swap weights')
        return self


class RunConfig(Section):
    """A whole run.toml."""

    run: RunSection = RunSection()
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = DataSection()
    inner: InnerSection = InnerSection()
    outer: OuterSection = Field(default_factory=OuterSection)
    pipeline: PipelineSection = PipelineSection()
    program: Annotated[ProgramSection | None, LATER] = None

    @model_validator(mode="before")
    @classmethod
    def fill_outer(cls, tables: Any) -> Any:
        """Fill in what [pipeline] or [program] implies for [outer], as far as the file does not say."""
        return outer_of_program(outer_of_pipeline(tables)) if isinstance(tables, dict) else tables

    @model_validator(mode="after")
    def check_program(self) -> Self:
        """A program brings weights that it has trained; it is never asked for a gradient."""
        if self.program is None:
            return self
        if self.outer.start != "none":
            raise ValueError(
                f'outer.start = "{self.outer.start}" needs Pier\'s own trainer: for a training program, write '
                'start = "none" in [outer]'
            )
        if self.outer.algorithm == "sync":
            raise ValueError('outer.algorithm = "sync" is for Pier\'s own trainer: use "pier", "diloco" or "noloco"')
        if self.pipeline.stages > 1:
            raise ValueError("pipeline.stages is for Pier's own trainer: leave it out with [program]")
        if self.run.pretrained:
            raise ValueError("run.pretrained is for Pier's own trainer: with [program], the program brings its weights")
        return self

    @model_validator(mode="after")
    def check_transformers(self) -> Self:
        """Refuse what needs Pier's own decoder, or its names for parameters."""
        if self.model.transformers is None:
            return self
        only = "is for Pier's own decoder (Llama, GPT-2), and transformers builds this model"
        if self.inner.optimizer == "muon":
            raise ValueError(f'inner.optimizer = "muon" {only}: use "adamw" or "sgd"')
        if self.data.document_mask:
            raise ValueError(f"data.document_mask {only}: leave it out")
        if self.inner.residual_stream != "auto":
            raise ValueError(f"inner.residual_stream {only}: leave it out")
        blocks = {block_of(name) for name, _ in self.model.transformers.shapes()} - {None}
        # `layers` may be any number, so no set of that size is made.
        if self.pipeline.stages > 1 and (len(blocks), blocks) != (self.model.layers, {*range(len(blocks))}):
            raise ValueError("pipeline.stages: the model's parameters are not numbered by its blocks: leave stages out")
        return self

    @model_validator(mode="after")
    def check_witness(self) -> Self:
        """Refuse a witness where its vote decides nothing."""
        if self.run.witness and (self.pipeline.stages > 1 or self.outer.algorithm == "noloco"):
            raise ValueError("run.witness is for rounds of all replicas: leave it out with pipeline.stages or noloco")
        return self

    @property
    def begins_pretrained(self) -> bool:
        """Whether the founder must have weights to begin with: the seed makes none for a model of transformers."""
        return self.run.pretrained or (self.program is None and self.model.transformers is not None)

    @property
    def full_from(self) -> int:
        """The first iteration of a pipeline, counted from 0, of those at the end that visit all stages."""
        return round(self.inner.total_steps * (1 - self.pipeline.full_end))

    @property
    def step_tokens(self) -> int:
        """Tokens that a site trains on in one inner step, at most."""
        return self.program.step_tokens if self.program else self.inner.batch_size * self.model.context

    @model_validator(mode="after")
    def check_stages(self) -> Self:
        """Require a block and a site for every stage, and an [outer] that the replicas of stages can do."""
        stages = self.pipeline.stages
        if stages > self.model.layers:
            raise ValueError(f"pipeline.stages = {stages} needs as many blocks: model.layers = {self.model.layers}")
        if stages > max(self.run.sites, 1):
            raise ValueError(f"pipeline.stages = {stages} needs as many sites: run.sites = {self.run.sites}")
        if self.model.subspace and stages == 1:
            raise ValueError("model.subspace is for models in stages: leave it out, or set pipeline.stages")
        if self.pipeline.full_end and (stages == 1 or self.pipeline.path_length == stages):
            raise ValueError("pipeline.full_end is for paths that leave stages out: leave it out")
        if flaw := jump_flaw(self.pipeline):
            raise ValueError(flaw)
        if stages > 1 and self.data.document_mask:
            raise ValueError("data.document_mask is not there for the stages of a pipeline: leave it out")
        if stages > 1 and self.inner.residual_stream != "auto":
            raise ValueError("inner.residual_stream is not there for the stages of a pipeline: leave it out")
        if stages > 1 and (flaw := outer_flaw(self.outer)):
            raise ValueError(flaw)
        return self

    def canonical(self) -> str:
        """The one JSON text of this configuration: defaults filled in, but for keys marked LATER; sorted, no spaces."""
        tables = _canonical(self)
        if self.data.tokenizer_hash:  # which says what the file is; each site has it at a path of its own
            tables["data"]["tokenizer"] = TOKENIZER
        return json.dumps(tables, sort_keys=True, separators=(",", ":"))

    def with_tokenizer(self, path: str) -> Self:
        """The same run, with its tokenizer at another path."""
        return self.model_copy(update={"data": self.data.model_copy(update={"tokenizer": path})})

    def hash(self) -> bytes:
        """SHA-256 of the canonical form: sites with equal hashes are in the same run."""
        return hashlib.sha256(self.canonical().encode()).digest()


def _canonical(section: Section) -> dict[str, Any]:
    tables: dict[str, Any] = section.model_dump(mode="json")
    for key, info in type(section).model_fields.items():
        value = getattr(section, key)
        if LATER in info.metadata and value == info.get_default():
            del tables[key]
        elif isinstance(value, Section):
            tables[key] = _canonical(value)
    return tables


def load(path: Path) -> RunConfig:
    """Read run.toml.

    Raises:
        PierError: the file is missing, is not TOML, or a key has a value that is not allowed; each such key is named.
    """
    tables = read_toml(path, "pier-node init")
    config = _checked(tables, str(path))
    for key in _unused(config.outer) & tables.get("outer", {}).keys():
        log.warning(
            '%s: outer.%s has no effect with algorithm = "%s" and schedule = "%s"',
            *(path, key, config.outer.algorithm, config.outer.schedule),
        )
    return config


def _unused(outer: OuterSection) -> set[str]:
    """Those of its keys that nothing reads, because of what others say."""
    if outer.algorithm not in ("sync", "noloco") and outer.schedule in ("constant", "anneal"):
        return set()
    return {"lr"} if outer.momentum_warmup else {"lr", "momentum"}


def from_canonical(text: str, where: str = "the peer's run configuration") -> RunConfig:
    """The configuration that a peer sent. Raises PierError, which names `where`: this version does not understand it.

    The path of a tokenizer that has a hash is not taken over: it is not covered by the run's hash.
    """
    try:
        tables = json.loads(text)
    except ValueError as error:
        raise PierError(f"{where} is not JSON: {error}") from error
    config = _checked(tables, where)
    return config.with_tokenizer(TOKENIZER) if config.data.tokenizer_hash else config


def _checked(tables: Any, where: str) -> RunConfig:
    config = validated(tables, RunConfig, where)
    if config.outer.algorithm == "noloco" and config.outer.noloco.gamma == 0:
        log.warning("%s: outer.noloco.gamma = 0: nothing pulls the sites' anchors together", where)
    if config.outer.codec in SPARSE and (config.outer.schedule != "constant" or config.outer.momentum > MOST_MOMENTUM):
        log.warning(
            '%s: outer.codec = "%s" trains badly with much outer momentum: leave momentum, lr and schedule out',
            where,
            config.outer.codec,
        )
    return config


MOST = 3
"""Most keys that are named; people who changed more know that it is another file."""
LONGEST = 200
"""Most characters of a value that are shown."""
_ABSENT = object()


def config_changes(before: str, now: str) -> str:
    """The keys that differ between two configurations in canonical form, with both values.

    One of them may come from another version of Pier, which has other keys.
    """
    found = list(_changes("", json.loads(before), json.loads(now)))
    more = f", and {len(found) - MOST} more" if len(found) > MOST else ""
    return ", ".join(found[:MOST]) + more


def _changes(key: str, before: Any, now: Any) -> Iterator[str]:
    if before == now:
        return
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {**before, **now}:
            yield from _changes(f"{key}.{name}" if key else name, before.get(name, _ABSENT), now.get(name, _ABSENT))
    else:
        yield f"{key} was {_shown(before)}, is {_shown(now)}"


def _shown(value: Any) -> str:
    text = "not there" if value is _ABSENT else json.dumps(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
