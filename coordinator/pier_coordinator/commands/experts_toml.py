"""The text of an experts.toml that shows every key of ExpertsConfig, its meaning and its value."""

from __future__ import annotations

from pier_node.commands.commented_toml import Notes, commented
from pier_node.commands.run_toml import DECIDES, MEANINGS
from pier_node.experts.config import ExpertsConfig

HEAD = """\
# An ensemble of domain experts: what `pier-coordinator experts plan` plans.
# Every key has a default and may be left out. A line `#key = …` shows what follows from another key of its
# section: take the # away to change it.
"""
SITES = """\
# A domain of your own:
#
#   [[domains]]
#   name = "contracts"
#   source = "parquet"               # text, jsonl or parquet; built-in ones need a name only
#   path = "/data/contracts"
#   text_field = "body"
#   weight = 2.0
#   sites = ["lab-a"]                # nobody else may see it

# Who trains. Without any [[sites]], those that are in the run of --data, as fast as they train there. Take the # away:
#
#   [[sites]]
#   name = "lab-a"
#   tflops = 60.0                    # measured in training: 1e-12 * (FLOPs per token) * (tokens/s), never the peak
#   memory_gb = 24.0                 # of the device that trains; 0 or left out: enough
#   line_mbit = 100.0                # 0 or left out: fast enough
#   hours = 12.0                     # how long it is there; 0 or left out: as long as it takes
"""

OWN = {
    "model.preset": "S by name, the model of run.toml; keys that follow from it can be changed one by one. M and L are "
    "alike, but for ffn_dim. A token is a byte.",
    "domains.name": "What it is called; of a built-in one, which it is.",
}


def experts_toml(preset: str = "") -> str:
    """The text; what follows from the preset is shown in lines that begin with #."""
    config = ExpertsConfig.model_validate({"model": {"preset": preset} if preset else {}})
    return "\n".join([HEAD, *commented(config, Notes({**MEANINGS, **OWN}, DECIDES)), SITES])
