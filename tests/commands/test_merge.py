"""`pier-node merge`: an ensemble as one model, which transformers loads and `pier-node serve` serves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from click.testing import Result
from experts.serving.ensembles import NAMES, config_of, make_ensemble, opened, served

from pier_node.experts.merging import load
from pier_node.outer.layout import Layout
from pier_node.trainer.model.export import export

Call = Callable[..., Result]


@pytest.fixture
def alike(tmp_path: Path) -> Path:
    """An ensemble of experts of one shape."""
    folder = tmp_path / "ensemble"
    for number in range(len(NAMES)):
        generator = torch.Generator().manual_seed(number)
        weights = torch.randn(Layout.of(config_of(0)).length, generator=generator) * 0.2
        export(config_of(0), weights, folder / f"e{number}")
    members = [{"domain": name, "folder": f"e{number}", "stands_in": True} for number, name in enumerate(NAMES)]
    (folder / "ensemble.json").write_text(json.dumps({"members": members}))
    return folder


@pytest.mark.slow
async def test_one_model_is_made_of_experts_served_and_reduced(call: Call, alike: Path, tmp_path: Path) -> None:
    out, less = tmp_path / "one", tmp_path / "less"
    done = call("merge", alike, out, "--steps", "3", "--rows", "4")
    assert done.exit_code == 0, done.output
    assert all(name in done.output for name in (*NAMES, "mean", "merged", f"pier-node serve --model {out}"))
    assert load(out).names == NAMES

    asking = opened(tmp_path, model=out)
    async with served(asking) as address:
        client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        told = await client.completions.create(model="one", prompt="import os", max_tokens=8, temperature=0)
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(out)
    prompt = torch.tensor([list(b"import os")])
    want = theirs.generate(prompt, do_sample=False, max_new_tokens=8, attention_mask=torch.ones_like(prompt))[0, 9:]
    assert told.choices[0].text == bytes(want.tolist()).decode("utf-8", "replace")

    done = call("merge", out, less, "--without", "topics")
    assert done.exit_code == 0, done.output
    assert load(less).names == ("encodings", "network")


def test_experts_of_unlike_shapes_are_refused_before_anything_is_written(call: Call, tmp_path: Path) -> None:
    done = call("merge", make_ensemble(tmp_path / "mine"), tmp_path / "out", "--steps", "0")
    assert done.exit_code == 1
    assert "unlike shapes" in done.output
    assert "pier-node serve --experts" in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--without", "sports"], "there is no such expert"),
        (["--without", "topics", "--without", "network"], "1 experts cannot be merged"),
        (["--active", "9"], "there are 3 experts"),
        (["--active", "1"], "Give --active 2 or more, or --steps 0"),
    ],
)
def test_what_cannot_be_merged_is_said(call: Call, alike: Path, tmp_path: Path, words: list[str], said: str) -> None:
    done = call("merge", alike, tmp_path / "out", *words)
    assert done.exit_code == 1
    assert said in done.output


def test_a_folder_of_something_else_is_kept(call: Call, alike: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("ten years")
    done = call("merge", alike, tmp_path / "mine")
    assert done.exit_code == 1
    assert "--force" in done.output
