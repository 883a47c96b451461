"""A model in stages: every parameter in one of them, and together bit for bit the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline.cases import config

from pier_node.outer.layout import Layout
from pier_node.pipeline.beginnings import made
from pier_node.pipeline.stage import Stage, gather, scatter, stage_blocks, stage_layout
from pier_node.trainer.model.initial import initial_weights

FORMS = [("llama", True), ("llama", False), ("gpt2", True)]


@given(st.integers(1, 64), st.integers(1, 64))
def test_blocks_are_dealt_evenly_and_in_order(layers: int, stages: int) -> None:
    blocks = stage_blocks(layers, stages)
    assert [index for part in blocks for index in part] == [*range(layers)]
    sizes = [len(part) for part in blocks]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == min(sizes)


@pytest.mark.parametrize(("form", "tied"), FORMS)
def test_stages_joined_are_the_whole_model(form: str, tied: bool) -> None:
    run = config(form=form, tied=tied)
    whole = initial_weights(run.model, run.run.seed).numpy()
    parts = {stage: made(run, stage) for stage in range(4)}
    for stage, part in parts.items():
        assert np.array_equal(part, scatter(run.model, 4, whole, stage))
    joined = np.full_like(whole, np.nan)
    gather(run.model, 4, parts, joined)
    assert np.array_equal(joined, whole)


@pytest.mark.parametrize(("form", "tied"), FORMS)
def test_a_site_builds_its_blocks_only_and_stage_0_the_ends(form: str, tied: bool) -> None:
    run = config(form=form, tied=tied)
    names = [{entry.name for entry in stage_layout(run.model, 4, stage).entries} for stage in range(4)]
    assert sum(map(len, names)) == len(set.union(*names)) == len(Layout.of(run.model).entries)
    assert {"embedding.weight", "norm.weight"} <= names[0]
    for stage in range(4):
        built = Stage(run, stage, torch.device("cpu"))  # it loads its layout by name, and refuses any other names
        assert {entry.name for entry in built.layout.entries} == names[stage]


def test_parts_of_another_length_are_refused() -> None:
    run = config()
    with pytest.raises(ValueError, match="parameters, not"):
        gather(run.model, 4, {1: np.zeros(5, np.float32)}, np.zeros(Layout.of(run.model).length, np.float32))
