from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from commands.conftest import CONFIG
from processes.run import CORPUS, Run
from tokenizers import Tokenizer, models, pre_tokenizers

from pier_node.commands.evaluate import bytes_per_token
from pier_node.rounds.weights import newest_weights
from pier_node.trainer.data.tokens import ByteTokenizer, FileTokenizer
from pier_node.trainer.model.export import export

Call = Callable[..., Result]


def test_an_untrained_model_knows_nothing(call: Call, site: Path) -> None:
    """Its loss is about that of 256 equal chances: ln 256 nats, 8 bits a byte."""
    done = call("evaluate", "--data", site, "--json")
    assert done.exit_code == 0, done.output
    score = json.loads(done.output)
    assert score["loss"] == pytest.approx(math.log(256), abs=0.2)
    assert score["perplexity"] == pytest.approx(math.exp(score["loss"]))
    assert score["bits_per_byte"] == pytest.approx(score["loss"] / math.log(2))
    assert score["tokens"] == CONFIG.inner.eval_batches * CONFIG.inner.batch_size * CONFIG.model.context
    assert (score["round"], score["model"]) == (3, "round 3 of run 'small'")


def test_people_read_the_same(call: Call, site: Path) -> None:
    done = call("evaluate", "--data", site, "--batches", "1")
    assert done.exit_code == 0
    assert done.output.startswith("Round 3 of run 'small', on 128 tokens of the validation split:\n")
    assert "nats a token" in done.output
    assert "bits per byte" in done.output


def test_a_model_folder_is_measured_on_the_same_text(call: Call, site: Path, tmp_path: Path) -> None:
    weights = newest_weights(site)
    export(weights.config, weights.flat, tmp_path / "model")
    of_site, of_model = (
        json.loads(call("evaluate", "--data", site, "--json", *more).output)
        for more in ([], ["--model", tmp_path / "model"])
    )
    assert of_model["round"] is None
    assert of_model["loss"] == pytest.approx(of_site["loss"], abs=1e-6)


def test_another_text_is_measured_where_the_site_had_another(call: Call, site: Path, tmp_path: Path) -> None:
    text = tmp_path / "other.txt"
    text.write_text("the same line again and again\n" * 20_000)
    done = call("evaluate", "--data", site, "--dataset", text, "--json")
    ours = json.loads(call("evaluate", "--data", site, "--json").output)
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["loss"] != pytest.approx(ours["loss"], abs=1e-4)


def test_a_folder_that_is_no_site_is_said(call: Call, tmp_path: Path) -> None:
    failed = call("evaluate", "--data", tmp_path)
    assert failed.exit_code == 1
    assert "belongs to no run yet" in failed.output


def test_bytes_behind_a_token(tmp_path: Path) -> None:
    library = Tokenizer(models.WordLevel({"pier": 0, "pierpier": 1, "?": 2}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    windows = [(np.zeros((2, 2), np.int64), np.array([[0, 1], [1, 1]]))]
    # "pier pierpier" and "pierpier pierpier": 13 and 17 bytes of 4 tokens
    assert bytes_per_token(FileTokenizer(tmp_path / "tokenizer.json"), windows) == 30 / 4
    assert bytes_per_token(ByteTokenizer(), windows) == 1.0


@pytest.mark.processes
def test_it_agrees_with_what_a_site_measures_itself(call: Call, run: Run) -> None:
    alpha = run.sites[0]
    done = call("evaluate", "--data", alpha.folder, "--dataset", CORPUS, "--json")
    assert done.exit_code == 0, done.output
    score = json.loads(done.output)
    alpha.reach(score["round"])
    measured = {event["round"]: event["validation_loss"] for event in alpha.events()}
    assert score["loss"] == pytest.approx(measured[score["round"]], abs=1e-5)
