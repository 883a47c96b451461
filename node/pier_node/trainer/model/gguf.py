"""A model as one GGUF file, which llama.cpp and the programs around it read (Ollama, LM Studio).

It is made of a folder that export.py wrote, in fp32, with names and metadata of the library `gguf`. Two things differ
from Hugging Face's layout. llama.cpp rotates each dimension of a head with its neighbour, so the rows of Llama's
queries and keys are reordered; and GPT-2's linear layers are stored as ours are.

Of tokenizers, llama.cpp splits text by rules that it has built in and a file names ("pre"). Those of GPT-2 and Llama 3
are known here. Tokenizers that merge nothing, such as `bytes`, need no rule.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout
from pier_node.trainer.data.tokens import END_OF_TEXT, check_vocab
from pier_node.trainer.model.decoder import EPSILON
from pier_node.trainer.model.export import GGUF, Rule, import_weights, rules

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REMEDY = "llama.cpp's own convert_hf_to_gguf.py may know this tokenizer; it reads the exported folder."


def require_gguf() -> Any:
    """The library. Raises PierError: it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise PierError("a GGUF file needs the library gguf", "In the clone of Pier: scripts/install gguf") from error
    return gguf


def write_gguf(folder: Path) -> Path:
    """Write the model of an exported folder to GGUF in it. Returns the file's path.

    Raises:
        PierError: the library is not installed, the folder has no such model, or llama.cpp cannot know its tokenizer.
    """
    gguf = require_gguf()
    config, flat = import_weights(folder)
    vocabulary = Vocabulary.read(folder, config.vocab_size)
    path = folder / GGUF
    half = path.with_suffix(".part")
    writer = gguf.GGUFWriter(half, config.form)
    try:
        _describe(writer, config)
        vocabulary.describe(writer, gguf.TokenType)
        tensors = list(_tensors(gguf, config, Layout.of(config).views(flat)))
        for name, tensor in tensors:
            writer.add_tensor_info(name, tensor.shape, tensor.dtype, tensor.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, tensor in tensors:
            writer.write_tensor_data(tensor)
        writer.close()
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise PierError(f"{path}: cannot write it: {error.strerror}", "Choose a folder that has room.") from error
    return path


def _describe(writer: Any, config: ModelSection) -> None:
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn_dim)
    writer.add_head_count(config.heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(0)  # all of it fp32
    if config.form == "llama":
        writer.add_head_count_kv(config.kv_heads)
        writer.add_layer_norm_rms_eps(EPSILON)
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_rope_dimension_count(config.dim // config.heads)
    else:
        writer.add_layer_norm_eps(EPSILON)


def _tensors(
    gguf: Any, config: ModelSection, ours: Mapping[str, Tensor]
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """The tensors as llama.cpp knows them; most share memory with ours."""
    arch = gguf.MODEL_ARCH.LLAMA if config.form == "llama" else gguf.MODEL_ARCH.GPT2
    names = gguf.get_tensor_name_map(arch, config.layers)
    for rule in rules(config):
        tensor = Rule(rule.theirs, rule.ours).join(ours)  # as ours: not transposed
        heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(rule.theirs.split(".")[-2], 0)
        if heads:
            tensor = neighbours(tensor, heads)
        yield names.get_name(rule.theirs, try_suffixes=(".weight", ".bias")), tensor.numpy()


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys, [heads · head_dim, dim], with those next to each other that are rotated together.

    Hugging Face rotates dimension i of a head with i + head_dim / 2, llama.cpp 2i with 2i + 1.
    """
    return rows.view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE tokenizer.

    Attributes:
        tokens: by id, in GPT-2's alphabet; "" where an id has no token.
        special: ids of tokens that stand for no text.
        merges: pairs, each as "LEFT RIGHT", the most important first.
        pre: llama.cpp's name of the rule by which text is split.
        end: id of the token at which a text ends.
        template: of chats; "": none.
    """

    tokens: list[str]
    special: frozenset[int]
    merges: list[str]
    pre: str
    end: int
    template: str = ""

    @classmethod
    def read(cls, folder: Path, size: int) -> Vocabulary:
        """That of an exported folder, for a model with `size` ids; tokens beyond these are left out.

        Raises:
            PierError: it is of another kind.
        """
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        about = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        model, added = content["model"], content.get("added_tokens") or []
        pre = _splitting(folder, content)
        merges = [it if isinstance(it, str) else " ".join(it) for it in model.get("merges", [])]
        ids = {**model["vocab"], **{it["content"]: it["id"] for it in added}}
        check_vocab(max(ids.values()) + 1, size, pretrained=True)
        ids = {token: number for token, number in ids.items() if number < size}
        tokens = [""] * size
        for token, number in ids.items():
            tokens[number] = token
        named = [about.get("eos_token"), *END_OF_TEXT]
        return cls(
            tokens=tokens,
            special=frozenset(it["id"] for it in added if it["special"] and it["id"] < size),
            merges=merges,
            pre=pre,
            end=next((ids[name] for name in named if name in ids), 0),  # of bytes, 0: no text has it
            template=about.get("chat_template", ""),
        )

    def describe(self, writer: Any, kinds: Any) -> None:
        """Write it down."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list([token or f"[unused {number}]" for number, token in enumerate(self.tokens)])
        control = self.special | {self.end}
        writer.add_token_types(
            [
                kinds.CONTROL if number in control else kinds.NORMAL if token else kinds.UNUSED
                for number, token in enumerate(self.tokens)
            ]
        )
        # llama.cpp wants merges; one whose result is no token makes none.
        writer.add_token_merges(self.merges or ["\u0100 \u0100"])
        writer.add_eos_token_id(self.end)
        writer.add_add_bos_token(False)
        if self.template:
            writer.add_chat_template(self.template)


def _splitting(folder: Path, content: Mapping[str, Any]) -> str:
    """llama.cpp's name of how the tokenizer splits text. Raises PierError: it has none, or none is known here."""
    step = content.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers", [step])
    last, before = steps[-1], steps[:-1]
    known = content["model"]["type"] == "BPE" and not content.get("normalizer") and last.get("type") == "ByteLevel"
    if known and not last.get("add_prefix_space"):
        patterns = [it["pattern"].get("Regex") for it in before if it.get("type") == "Split"]
        if not content["model"].get("merges"):
            return "default"
        if not before and last.get("use_regex", True):
            return "gpt-2"
        if patterns == [_LLAMA_3] and len(before) == 1:
            return "llama-bpe"
    raise PierError(f"{folder / 'tokenizer.json'}: no rule of llama.cpp is known that splits text like it", _REMEDY)
