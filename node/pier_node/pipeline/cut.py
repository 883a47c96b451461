"""How a model is cut into stages: which blocks, and so which parameters, each of them has (spec/skippipe.md section 1).

Stage 0 also has the embeddings, the final norm and the head, so that tied embeddings lie in one stage and labels never
leave the sites that hold it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pier_node.config import ModelSection
from pier_node.model.layout import Entry, Layout
from pier_node.shared import Vector


def stage_blocks(layers: int, stages: int) -> tuple[range, ...]:
    """The consecutive blocks of each stage, equally many within one; stage 0, which has the ends too, has fewest."""
    ends = [layers * (stage + 1) // stages for stage in range(stages)]
    return tuple(range(start, end) for start, end in zip([0, *ends], ends))


def stage_layout(config: ModelSection, stages: int, stage: int) -> Layout:
    """The layout of a vector of the parameters of one stage, in the order of the whole model."""
    return Layout.laid((entry.name, entry.shape) for entry in _held(config, stages, stage))


def scatter(config: ModelSection, stages: int, whole: Vector, stage: int) -> Vector:
    """The parameters of one stage, out of a vector of the whole model's [parameters]."""
    return np.concatenate([whole[it.offset : it.offset + it.size] for it in _held(config, stages, stage)])


def gather(config: ModelSection, stages: int, parts: Mapping[int, Vector], whole: Vector) -> None:
    """Write the parameters of stages to their places in a vector of the whole model. ValueError: another length."""
    for stage, part in parts.items():
        held, offset = _held(config, stages, stage), 0
        if (length := sum(entry.size for entry in held)) != len(part):
            raise ValueError(f"stage {stage} has {length} parameters, not {len(part)}")
        for entry in held:
            whole[entry.offset : entry.offset + entry.size] = part[offset : offset + entry.size]
            offset += entry.size


def _held(config: ModelSection, stages: int, stage: int) -> list[Entry]:
    blocks = stage_blocks(config.layers, stages)[stage]
    return [entry for entry in Layout.of(config).entries if _is_held(entry.name, blocks, ends=stage == 0)]


def _is_held(name: str, blocks: range, ends: bool) -> bool:
    return int(name.split(".")[1]) in blocks if name.startswith("blocks.") else ends
