"""A trained model and its tokenizer as a folder in Hugging Face's layout, written and read back.

The llama form is `LlamaForCausalLM`, the gpt2 form `GPT2LMHeadModel`. GPT-2's linear layers (`Conv1D`) are the
transpose of ours, with queries, keys and values fused into one.

config.json is written last and removed first, so a folder that has one is complete. The mark is written first: a folder
that has one contains only what Pier put there, and may be overwritten. `AutoTokenizer` reads tokenizer.json and
tokenizer_config.json.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout
from pier_node.trainer.model.decoder import EPSILON
from pier_node.trainer.model.initial import fixed_embedding, with_fixed, writes


@dataclass(frozen=True)
class Rule:
    """One of their tensors: ours concatenated along the first dimension, optionally transposed."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Their tensor from ours; it shares memory with ours if possible."""
        parts = [tensors[name] for name in self.ours]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.T.contiguous() if self.transposed else joined

    def split(self, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Ours from theirs, given our shapes. Raises RuntimeError: the number of rows does not match ours."""
        rows = [shapes[name][0] for name in self.ours]
        return dict(zip(self.ours, torch.split(tensor.T if self.transposed else tensor, rows)))


# Within a block, their name: ours.
_LLAMA_BLOCK = {
    "input_layernorm.weight": "attention_norm.weight",
    "self_attn.q_proj.weight": "attention.query.weight",
    "self_attn.k_proj.weight": "attention.key.weight",
    "self_attn.v_proj.weight": "attention.value.weight",
    "self_attn.o_proj.weight": "attention.output.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
    "mlp.gate_proj.weight": "mlp.gate.weight",
    "mlp.up_proj.weight": "mlp.up.weight",
    "mlp.down_proj.weight": "mlp.down.weight",
}
_GPT2_NORMS = {"ln_1": "attention_norm", "ln_2": "mlp_norm"}
_GPT2_LINEARS = {
    "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
    "attn.c_proj": ("attention.output",),
    "mlp.c_fc": ("mlp.up",),
    "mlp.c_proj": ("mlp.down",),
}


def rules(config: ModelSection) -> Iterator[Rule]:
    """One rule for each of their tensors, from the embedding to the head; together they name each of ours once."""
    if config.form == "llama":
        yield Rule("model.embed_tokens.weight", ("embedding.weight",))
        for index in range(config.layers):
            for theirs, ours in _LLAMA_BLOCK.items():
                yield Rule(f"model.layers.{index}.{theirs}", (f"blocks.{index}.{ours}",))
        yield Rule("model.norm.weight", ("norm.weight",))
    else:
        yield Rule("transformer.wte.weight", ("embedding.weight",))
        yield Rule("transformer.wpe.weight", ("positions.weight",))
        for index in range(config.layers):
            yield from _gpt2_block(index)
        yield from (Rule(f"transformer.ln_f.{kind}", (f"norm.{kind}",)) for kind in ("weight", "bias"))
    if not config.tie_embeddings:
        yield Rule("lm_head.weight", ("head.weight",))


def _gpt2_block(index: int) -> Iterator[Rule]:
    for kind in ("weight", "bias"):
        for theirs, norm in _GPT2_NORMS.items():
            yield Rule(f"transformer.h.{index}.{theirs}.{kind}", (f"blocks.{index}.{norm}.{kind}",))
        for theirs, linears in _GPT2_LINEARS.items():
            ours = tuple(f"blocks.{index}.{linear}.{kind}" for linear in linears)
            yield Rule(f"transformer.h.{index}.{theirs}.{kind}", ours, transposed=kind == "weight")


_ARCHITECTURES = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}

_KEYS: dict[str, dict[str, str]] = {
    "llama": {
        "vocab_size": "vocab_size",
        "dim": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "ffn_dim": "intermediate_size",
        "context": "max_position_embeddings",
        "rope_theta": "rope_theta",
        "tie_embeddings": "tie_word_embeddings",
    },
    "gpt2": {
        "vocab_size": "vocab_size",
        "dim": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "ffn_dim": "n_inner",
        "context": "n_positions",
        "tie_embeddings": "tie_word_embeddings",
    },
}
"""By form, our key: theirs."""

_FIXED: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
    },
    "gpt2": {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": EPSILON,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
}
"""Fixed properties of the decoder."""

# If left out, the ids would default to those of Llama's and GPT-2's own vocabularies, and text would end at an ordinary
# token.
_TEXT_ENDS = {"bos_token_id": None, "eos_token_id": None}

# GPT2Config's defaults are 0.1.
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def to_config(config: ModelSection) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": [_ARCHITECTURES[config.form]],
        "model_type": config.form,
        "torch_dtype": "float32",
        **{theirs: getattr(config, ours) for ours, theirs in _KEYS[config.form].items()},
        **_FIXED[config.form],
        **_TEXT_ENDS,
        **(_NO_DROPOUT if config.form == "gpt2" else {}),
    }


def from_config(content: Mapping[str, Any]) -> ModelSection:
    """The [model] section that a config.json describes.

    Raises:
        PierError: the model is of a kind, or has a feature, that the decoder lacks, or a key is missing.
    """
    form = content.get("model_type")
    if form not in [*_KEYS]:  # it may be of any type
        raise PierError(f"config.json: model_type = {form!r} is unknown; known: {', '.join(_KEYS)}", _REMEDY)
    content = _filled_in(content)
    for key, value in _FIXED[form].items():
        if content.get(key, value) != value:
            raise PierError(f"config.json: {key} = {content[key]!r}; only {value!r} is known", _REMEDY)
    ours = {key: content.get(theirs) for key, theirs in _KEYS[form].items()}
    try:
        return ModelSection.model_validate({"form": form, **ours})
    except ValidationError as error:
        raise PierError(f"config.json: {_explain(error, form)}", _REMEDY) from error


def _filled_in(content: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that other versions of transformers write elsewhere, or leave out where they follow from others."""
    found = dict(content)
    rope = found.get("rope_parameters")
    if isinstance(rope, dict) and rope:
        found.setdefault("rope_theta", rope.get("rope_theta"))
        found["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    heads, width, each = (found.get(key) for key in ("num_attention_heads", "hidden_size", "head_dim"))
    if isinstance(heads, int) and isinstance(width, int) and heads and each and each != width / heads:
        raise PierError(f"config.json: head_dim = {each}; only hidden_size / num_attention_heads is known", _REMEDY)
    if found.get("model_type") == "gpt2":
        wide = found.get("n_embd")
        if found.get("n_inner") is None and isinstance(wide, int):
            found["n_inner"] = 4 * wide
        found.setdefault("tie_word_embeddings", True)
    return found


_REMEDY = (
    "Pier's own trainer knows Llama and GPT-2 as `pier-node export` writes them. Train any other model by a program of "
    "your own: docs/program.md."
)


def _explain(error: ValidationError, form: str) -> str:
    problems = [(".".join(_KEYS[form][str(key)] for key in each["loc"]), each) for each in error.errors()]
    return "; ".join(f"{key} = {each['input']!r}: {each['msg']}" if key else each["msg"] for key, each in problems)


def write_tokenizer(tokenizer: str, folder: Path, context: int) -> dict[str, int]:
    """Write the tokenizer's two files. The special tokens and the chat template of a tokenizer.json's folder are kept.

    Returns the ids of the tokens that begin and end a text, as config.json names them, as far as they are known.

    Args:
        tokenizer: `bytes`, or the path of the tokenizer.json that the model was trained with.
        folder: the folder of config.json.
        context: maximum length of a text for the model, in tokens.

    Raises:
        PierError: the tokenizer.json does not exist.
    """
    kept: dict[str, Any] = {}
    if tokenizer == "bytes":
        byte_tokenizer().save(str(folder / "tokenizer.json"))
    else:
        source, target = Path(tokenizer), folder / "tokenizer.json"
        _require_tokenizer(source)
        if not (target.exists() and source.samefile(target)):
            shutil.copyfile(source, target)
        kept = _kept(source)
    about = {
        **kept,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {f"{key}_id": library.token_to_id(kept[key]) for key in ("bos_token", "eos_token") if key in kept}
    return {key: id for key, id in ids.items() if id is not None}


def _kept(tokenizer: Path) -> dict[str, Any]:
    """What the files beside a tokenizer.json say of chats, and of special tokens that it has; nothing without them."""
    library, template = Tokenizer.from_file(str(tokenizer)), tokenizer.with_name("chat_template.jinja")
    try:
        about = dict(json.loads(tokenizer.with_name("tokenizer_config.json").read_text()))
    except (OSError, ValueError, TypeError):
        about = {}
    kept = {key: about[key] for key in about if key == "chat_template"}
    for key in (key for key in about if key.endswith("_token")):
        text = about[key].get("content") if isinstance(about[key], dict) else about[key]
        if isinstance(text, str) and library.token_to_id(text) is not None:
            kept[key] = text
    return {**kept, "chat_template": template.read_text()} if template.exists() else kept


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose token ids are the values of the text's UTF-8 bytes: byte-level BPE without merges."""
    vocabulary = {character: value for value, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_characters() -> list[str]:
    # GPT-2's alphabet: a printable Latin-1 byte is its own character; the others are those from U+0100 on, in order.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _require_tokenizer(file: Path) -> None:
    remedy = "Name the tokenizer.json that the run was trained with."
    if not file.is_file():
        raise PierError(f"{file}: no such tokenizer", remedy)
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise PierError(f"{file}: not a tokenizer.json: {error}", remedy) from error


SHARD_BYTES = 5_000_000_000

INDEX = "model.safetensors.index.json"
GGUF = "model.gguf"
MARK = ".pier-export"
_MARK_TEXT = "Pier wrote this model. `pier-node export` replaces it when it is given this folder again.\n"


def export(
    config: ModelSection, weights: Tensor, folder: Path, tokenizer: str = "bytes", shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write weights as `LlamaForCausalLM` or `GPT2LMHeadModel`, with a tokenizer, for `from_pretrained`.

    A model whose blocks write to a subspace becomes an ordinary one, with zeros where they do not write.

    Args:
        config: the [model] section.
        weights: flat, shape [Layout.length].
        folder: created if needed; any model in it is replaced. `require_ours` refuses it where it may not be.
        tokenizer: as in the [data] section: `bytes`, or the path of a tokenizer.json.
        shard_bytes: larger weights are split into files of at most this size in bytes, with an index.

    Returns:
        The folder.

    Raises:
        PierError: the folder cannot be written, or the tokenizer.json does not exist.
    """
    tensors = {name: _whole(config, name, it) for name, it in Layout.of(config).views(weights).items()}
    return write_model(folder, to_config(config), list(rules(config)), tensors, tokenizer, shard_bytes)


def _whole(config: ModelSection, name: str, tensor: Tensor) -> Tensor:
    """A parameter of a model whose blocks write to all channels, from that of one whose blocks write to a subspace."""
    if config.subspace and name == "embedding.weight":
        return with_fixed(tensor, fixed_embedding(config))
    if config.subspace and writes(name):
        return functional.pad(tensor, (0, 0, 0, config.dim - config.subspace))
    return tensor


def write_model(
    folder: Path,
    about: Mapping[str, Any],
    all_rules: list[Rule],
    tensors: Mapping[str, Tensor],
    tokenizer: str,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write any model as `export` does.

    Args:
        about: the content of config.json.
        all_rules: one for each of their tensors.
        tensors: ours, by name.
    """
    with exporting(folder, about, tokenizer, about.get("max_position_embeddings") or about["n_positions"]):
        clear(folder)
        _write_weights(all_rules, tensors, folder, shard_bytes)
    return folder


@contextmanager
def exporting(folder: Path, about: Mapping[str, Any], tokenizer: str, context: int) -> Iterator[None]:
    """Export a model: in here the caller clears the folder and writes the weights. config.json comes last.

    Args:
        about: the content of config.json.
        context: most tokens that the model reads.

    Raises:
        PierError: the folder cannot be written, or there is no such tokenizer.json. Then an earlier export stays whole.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).write_text(_MARK_TEXT)
        if tokenizer != "bytes":
            _require_tokenizer(Path(tokenizer))
        yield
        ends = write_tokenizer(tokenizer, folder, context)
        unknown = {key: id for key, id in ends.items() if key in about and about[key] is None}
        (folder / "config.json").write_text(json.dumps({**about, **unknown}, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise PierError(
            f"{folder}: cannot export: {error}", "Choose a folder that has room and can be written."
        ) from error


def require_ours(folder: Path) -> None:
    """Raises PierError: an export may not replace what is in a folder, which is neither empty nor an earlier export."""
    if folder.exists() and not (folder / MARK).exists() and any(folder.iterdir()):
        raise PierError(
            f"{folder} is not empty, and Pier did not write what is in it",
            "Name a new folder. With --force a model that is there is replaced, for good.",
        )


def import_weights(folder: Path) -> tuple[ModelSection, Tensor]:
    """Read an export back: the [model] section, and the flat fp32 weights, shape [Layout.length].

    Raises:
        PierError: it is not an export, it is damaged, or the decoder lacks a feature of its model.
    """
    config = read_config(folder)
    layout = Layout.of(config)
    flat = torch.empty(layout.length)
    shapes = {entry.name: entry.shape for entry in layout.entries}
    wanted = {rule.theirs: rule for rule in rules(config)}
    try:
        for name, tensor in stored(folder):
            if name not in wanted and f"transformer.{name}" in wanted:
                name = f"transformer.{name}"  # GPT-2 as it was first published
            if name in wanted or not _FOLLOWS.search(name):
                layout.store(wanted.pop(name).split(tensor, shapes), flat)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise PierError(f"{folder}: the weights do not fit config.json: {error}", _DAMAGED) from error
    if wanted:
        raise PierError(f"{folder}: no weights for {', '.join(wanted)}", _DAMAGED)
    return config, flat


def read_config(folder: Path) -> ModelSection:
    """The [model] section of an export. Raises PierError: as `import_weights` does."""
    return from_config(read_json(folder / "config.json"))


_FOLLOWS = re.compile(r"(^|\.)(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq|lm_head\.weight)$")
"""Tensors in files of other programs that follow from config.json, or from the embedding if it is tied."""
_DAMAGED = "Write the folder again (`pier-node export`, or `save_pretrained` of transformers), or download it again."


def clear(folder: Path) -> None:
    """Remove the model that an earlier export left in a folder. Raises OSError."""
    for name in ("config.json", INDEX, "model.safetensors", "model-?????-of-?????.safetensors", GGUF):
        for old in folder.glob(name):
            old.unlink()


def _write_weights(all_rules: list[Rule], tensors: Mapping[str, Tensor], folder: Path, shard_bytes: int) -> None:
    by_name = {rule.theirs: rule for rule in all_rules}
    # Of their tensors only the sizes are wanted here: each is made when its file is written.
    sizes = {
        name: torch.empty(sum(tensors[it].nbytes for it in rule.ours), dtype=torch.uint8, device="meta")
        for name, rule in by_name.items()
    }
    shards = split_torch_state_dict_into_shards(sizes, max_shard_size=shard_bytes)
    for file, names in shards.filename_to_tensors.items():
        save_file({name: by_name[name].join(tensors) for name in names}, folder / file, metadata={"format": "pt"})
        # safetensors creates files for their owner only, whatever the umask allows.
        (folder / file).chmod((folder / MARK).stat().st_mode)
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors in a folder with their names, one after the other. Raises OSError, SafetensorError and PierError."""
    index = folder / INDEX
    names = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            yield from ((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118


def read_json(path: Path) -> dict[str, Any]:
    """The content of config.json, or of the index. Raises PierError."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise PierError(
            f"{path}: no model in Hugging Face's format: {why}",
            "Name a folder with config.json, *.safetensors and tokenizer.json, as `pier-node export` writes one.",
        ) from error
