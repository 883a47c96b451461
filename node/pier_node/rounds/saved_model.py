"""The weights that a command works with: from a site's newest checkpoint, or from a folder in Hugging Face's layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection, RunConfig
from pier_node.outer.state import OuterState
from pier_node.rounds.folder import load_run, require_folder
from pier_node.rounds.state_store import CHECKPOINTS, STATES, StateStore
from pier_node.trainer.data.tokens import Tokenizer, open_tokenizer
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.hub import HubDecoder, filled_model, import_weights


@dataclass(frozen=True)
class Weights:
    """A model at rest.

    Attributes:
        flat: the weights, fp32, shape [parameters].
        tokenizer: as in [data] of run.toml: `bytes`, or the path of a tokenizer.json.
        origin: where the weights come from, in words.
        round: their outer round; None for a model folder, which does not say.
    """

    config: ModelSection
    flat: Tensor
    tokenizer: str
    origin: str
    round: int | None = None

    def model(self, device: torch.device) -> Decoder:
        """The decoder with these weights, fp32. Raises PierError: it is another model, which transformers computes."""
        if isinstance(model := self.any_model(device), Decoder):
            return model
        raise PierError(
            f"{self.origin} is no model of Pier's own decoder (Llama, GPT-2); transformers computes it",
            "`pier-node evaluate`, `generate` and `serve --model` take it.",
        )

    def any_model(self, device: torch.device) -> Decoder | HubDecoder:
        """The model with these weights, fp32. Raises PierError: transformers, which it needs, is missing."""
        return filled_model(self.config, self.flat, device)

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer of these weights. Raises PierError."""
        return open_tokenizer(self.tokenizer)


def site_config(folder: Path) -> RunConfig:
    """Configuration of the run that a data folder belongs to. Raises PierError if it belongs to none."""
    require_folder(folder)
    config = load_run(folder)
    if config is None:
        raise PierError(
            f"{folder} belongs to no run yet", "Name the --data folder of a site; `pier-node start` makes one."
        )
    return config


def newest_state(folder: Path, config: RunConfig) -> OuterState:
    """The newest state in a data folder, whose checkpoint may be due later. Raises PierError if there is none."""
    checkpoints, states = (StateStore(folder / name, config.hash()) for name in (CHECKPOINTS, STATES))
    last = checkpoints.peek()
    state = states.after(last[1]["round"] if last else 0) or checkpoints.newest_state()
    if state is None and config.pipeline.stages > 1:
        raise PierError(
            f"{folder} has no whole model: its site holds one stage of it",
            "Sites of stage 0 join the stages at the end of the run: name the folder of one.",
        )
    if state is None:
        raise PierError(f"{folder} has no checkpoint yet", "Wait for the first outer round: see `pier-node status`.")
    return state


def newest_weights(folder: Path) -> Weights:
    """The anchor of the newest checkpoint in a data folder, whether or not its daemon runs. Raises PierError."""
    config = site_config(folder)
    if config.program:
        raise PierError(
            f"{folder} is of a run that trains a model of its users' own",
            "In Python, `pier.load(model, folder)` puts the newest weights into the model.",
        )
    state = newest_state(folder, config)
    origin = f"round {state.round} of run {config.run.name!r}"
    return Weights(config.model, torch.from_numpy(state.anchor), config.data.tokenizer, origin, state.round)


def exported_weights(folder: Path) -> Weights:
    """The weights and the tokenizer in a model folder. Raises PierError."""
    config, flat = import_weights(folder)
    return Weights(config, flat, str(folder / "tokenizer.json"), f"the model in {folder}")


def find_weights(data: Path, model: Path | None) -> Weights:
    """Weights from the model folder if one is given, else from the site. Raises PierError."""
    return exported_weights(model) if model else newest_weights(data)


def pick_device(name: str) -> torch.device:
    """The device that an option names; "" picks a GPU if there is one. Raises PierError."""
    if not name:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch built without CUDA asserts
        problem = str(error).splitlines()[0]
        raise PierError(f"--device {name}: {problem}", "Give cpu, cuda, or cuda:N for the GPU number N.") from error
    return device
