"""Pretrained models in and out, in Hugging Face's format: Pier's own decoder if it knows them, else transformers.

Any causal language model of transformers can be trained that computes logits from token ids alone. It is built from the
config.json that run.toml has in [model.transformers], by transformers' own code and never by code that comes with a
model; its parameters are fp32 and have the names that transformers gives them. It stays in evaluation mode, so it drops
no activations, and its loss is the plain cross-entropy, without what some mixtures of experts add for their routers.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from pier_node.base.errors import PierError
from pier_node.base.toml import validated
from pier_node.config.pretrained import INSTALL, LIBRARY, flaw, plain
from pier_node.config.program import described
from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout
from pier_node.trainer.model import export as own
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.loss import loss_of

SHOWN = 300
"""Most characters of what transformers says is wrong."""
UNBOUNDED = 1 << 20
"""Context of a model that names none."""


class HubDecoder(nn.Module):
    """A model of transformers, used like `Decoder`. Its parameters have no memory until `assign` or `to_empty`.

    Attributes:
        config: the [model] section.
        blocks: its layers, by name.
        separator: None: it cannot keep documents apart.
    """

    def __init__(self, config: ModelSection, whole: Any) -> None:
        super().__init__()
        self.config, self.separator = config, None
        for name, part in whole.named_children():
            self.add_module(name, part)
        kinds = {*(whole._no_split_modules or ())}
        self.blocks = {name: part for name, part in whole.named_modules() if type(part).__name__ in kinds}
        self._whole = (whole,)  # a tuple, for its parts are registered already, under their names in it

    @property
    def whole(self) -> Any:
        """The model as transformers has built it."""
        return self._whole[0]

    def forward(self, tokens: Tensor, targets: Tensor | None = None, z_loss: float = 0.0) -> Tensor:
        """[batch, time] token ids -> [batch, time, vocab] logits, or their `summed_loss` with `targets`."""
        logits: Tensor = self.whole(input_ids=tokens, use_cache=False).logits
        return logits if targets is None else loss_of(logits, targets, z_loss)

    def assign(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Take these tensors on a device as parameters, by name, and the buffers there with their values."""
        new = {old: nn.Parameter(tensors[name]) for name, old in self.named_parameters()}  # tied ones appear once
        for module in self.modules():
            for name, old in module._parameters.items():
                if old is not None:
                    module._parameters[name] = new[old]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:  # noqa: ARG002 - that of any module
        """Give the parameters memory on a device, and take the buffers there with their values."""
        empty = {name: torch.empty_like(old, device=device) for name, old in self.named_parameters()}
        self.assign(empty, device)
        return self

    def save(self, folder: Path) -> None:
        """Write weights and config.json with the names of files and tensors that transformers expects."""
        self.whole.save_pretrained(folder, max_shard_size="5GB")


def empty_model(config: ModelSection) -> Decoder | HubDecoder:
    """The run's model, whose parameters are on the meta device until `to_empty`.

    Raises:
        PierError: transformers is missing, or builds another model than the run's.
    """
    if config.transformers is None:
        with torch.device("meta"):
            return Decoder(config)
    section = config.transformers
    model = HubDecoder(config, _built(section.content, f"the {section.kind} of the run"))
    ours = described((name, tuple(it.shape)) for name, it in model.named_parameters())
    if ours != section.tensors:
        raise PierError(
            f"{LIBRARY} {_library().__version__} builds another {section.kind} than that of the run",
            "Use the version of transformers that the run was founded with, or one near to it.",
        )
    return model


def filled_model(config: ModelSection, flat: Tensor, device: torch.device) -> Decoder | HubDecoder:
    """The model with these weights, fp32 [parameters], on a device. Raises PierError as `empty_model` does."""
    model, views = empty_model(config), Layout.of(config).views(flat)
    if isinstance(model, Decoder):
        model.load_state_dict({name: view.to(device) for name, view in views.items()}, assign=True)
    else:
        model.assign({name: view.to(device) for name, view in views.items()}, device)
    return model.eval()


def read_config(folder: Path) -> ModelSection:
    """The [model] section of the model in a folder. Raises PierError: neither Pier nor transformers can train it."""
    content = own.read_json(folder / "config.json")
    try:
        return own.from_config(content)
    except PierError as unknown:
        if find_spec(LIBRARY) is None:
            raise PierError(unknown.problem, f"transformers may know this model. {INSTALL}") from unknown
    return _section(folder, content)


def import_weights(folder: Path) -> tuple[ModelSection, Tensor]:
    """The [model] section and the flat fp32 weights, shape [parameters], of the model in a folder. Raises PierError."""
    config = read_config(folder)
    if config.transformers is None:
        return own.import_weights(folder)
    library, about = _library(), _config(config.transformers.content, str(folder))
    try:
        whole, report = library.AutoModelForCausalLM.from_pretrained(
            folder,
            config=about,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # of transformers, which has no class of its own for them
        raise _unreadable(str(folder), error) from error
    if missing := sorted(report["missing_keys"]):
        raise _unreadable(str(folder), ValueError(f"there are no weights for {missing[0]}"))
    layout = Layout.of(config)
    flat = torch.empty(layout.length)
    layout.store(dict(whole.named_parameters()), flat)
    return config, flat


def export(config: ModelSection, flat: Tensor, folder: Path, tokenizer: str) -> Path:
    """Write weights, shape [parameters], and a tokenizer for `from_pretrained`: see export.py. Returns the folder.

    A model of transformers gets the config.json that it came with, but for the precision.
    """
    if config.transformers is None:
        return own.export(config, flat, folder, tokenizer)
    model, about, part = empty_model(config), config.transformers.content, folder / ".writing"
    assert isinstance(model, HubDecoder)
    model.assign(Layout.of(config).views(flat), flat.device)
    about |= {key: "float32" for key in _PRECISION if key in about}
    try:
        with own.exporting(folder, about, tokenizer, config.context):
            model.save(part)
            own.clear(folder)
            (part / "config.json").unlink()
            for file in part.iterdir():
                file.chmod((folder / own.MARK).stat().st_mode)  # safetensors makes files for their owner only
                file.replace(folder / file.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


_PRECISION = ("dtype", "torch_dtype")


def _section(folder: Path, content: Mapping[str, Any]) -> ModelSection:
    """The [model] section of a model that transformers builds. Raises PierError."""
    if "quantization_config" in content:
        raise PierError(f"{folder}: the weights are quantized", "Give a folder with weights in bf16, fp16 or fp32.")
    kept = plain(content)
    if problem := flaw(kept):
        raise _unreadable(str(folder), ValueError(problem))
    whole = _built(kept, str(folder))
    config, parameters = whole.config, dict(whole.named_parameters())
    tied = dict(whole.named_parameters(remove_duplicate=False))
    if other := sorted({*whole.state_dict()} - tied.keys()):
        raise PierError(
            f"{folder}: {other[0]} is no parameter: sites do not exchange it",
            "Train this model by a program of your own: docs/program.md.",
        )
    rows, width = whole.get_input_embeddings().weight.shape
    heads = getattr(config, "num_attention_heads", None) or 1
    numbers = {
        "vocab_size": rows,
        "dim": width,
        "layers": getattr(config, "num_hidden_layers", None) or 1,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "ffn_dim": getattr(config, "intermediate_size", None) or 4 * width,
        "context": getattr(config, "max_position_embeddings", None) or UNBOUNDED,
        "tie_embeddings": len(tied) > len(parameters),
    }
    tensors = described((name, tuple(it.shape)) for name, it in parameters.items())
    section = {"config": json.dumps(kept), "tensors": tensors}
    return validated({"form": LIBRARY, **numbers, "transformers": section}, ModelSection, str(folder))


def _built(content: Mapping[str, Any], where: str) -> Any:
    """The model of a config.json, in evaluation mode, with parameters on the meta device. Raises PierError."""
    config = _config(content, where)
    if config.get_text_config() is not config or config.is_encoder_decoder:
        raise PierError(
            f"{where}: a {config.model_type} is more than a decoder of text",
            "Give the folder of a causal language model, or train it by a program of your own: docs/program.md.",
        )
    try:
        with _parameters_on_meta():
            return _library().AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
    except Exception as error:  # of transformers, which has no class of its own for them
        raise _unreadable(where, error) from error


def _config(content: Mapping[str, Any], where: str) -> Any:
    """A config.json as transformers takes it, which leaves the precision to what is stored. Raises PierError."""
    library = _library()
    try:
        about = {key: copy.deepcopy(content[key]) for key in content if key not in _PRECISION}
        return library.AutoConfig.for_model(**about)
    except Exception as error:  # of transformers, which has no class of its own for them
        raise _unreadable(where, error) from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """In here, modules get parameters without memory, but buffers with their values: nobody could tell those later."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # a tied one stays the same object
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    setattr(nn.Module, "register_parameter", registered)  # noqa: B010 - a method, for mypy
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010


def _library() -> Any:
    try:
        transformers: Any = import_module(LIBRARY)
    except ImportError as error:
        raise PierError(f"transformers cannot be loaded: {error}", INSTALL) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _unreadable(where: str, error: Exception) -> PierError:
    said = " ".join(str(error).split()) or type(error).__name__
    return PierError(
        f"{where}: transformers cannot use this model: {said[:SHOWN]}",
        "Give the folder of a causal language model that this transformers knows, with config.json and *.safetensors; "
        "or train it by a program of your own: docs/program.md.",
    )
