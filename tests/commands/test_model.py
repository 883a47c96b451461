from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from commands.conftest import CONFIG, TABLES, save_round
from processes.run import CORPUS, Run
from tokenizers import Tokenizer, models, pre_tokenizers

from pier_node.commands import model
from pier_node.commands.model import bytes_per_token
from pier_node.config.run import RunConfig
from pier_node.rounds.folder import save_run
from pier_node.rounds.saved_model import newest_weights
from pier_node.trainer.data.tokens import ByteTokenizer, FileTokenizer
from pier_node.trainer.model import evaluate
from pier_node.trainer.model.export import export, import_weights

Call = Callable[..., Result]


def test_the_newest_checkpoint_becomes_a_model_folder(call: Call, site: Path, tmp_path: Path) -> None:
    state = save_round(site, 4)
    done = call("export", "--data", site, tmp_path / "out")
    assert done.exit_code == 0
    assert "round 4 of run 'small'" in done.output
    config, flat = import_weights(tmp_path / "out")
    assert config.dim == 32
    assert torch.equal(flat, torch.from_numpy(state.anchor))


def test_an_earlier_export_is_replaced_and_other_folders_are_left_alone(call: Call, site: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert call("export", "--data", site, out).exit_code == 0
    state = save_round(site, 5)
    assert call("export", "--data", site, out).exit_code == 0
    assert torch.equal(import_weights(out)[1], torch.from_numpy(state.anchor))
    refused = call("export", "--data", site, site)
    assert refused.exit_code == 1
    assert "did not write what is in it" in refused.output
    assert not (site / "config.json").exists()


def test_a_model_of_somebody_else_is_replaced_only_by_force(call: Call, site: Path, tmp_path: Path) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    theirs = {"config.json": "{}", "tokenizer_config.json": "{}", "model.safetensors": "a year of work"}
    for name, text in theirs.items():
        (out / name).write_text(text)
    refused = call("export", "--data", site, out)
    assert refused.exit_code == 1
    assert "--force" in refused.output
    assert {path.name: path.read_text() for path in out.iterdir()} == theirs
    assert call("export", "--data", site, "--force", out).exit_code == 0
    assert import_weights(out)[0].dim == 32


def test_a_site_without_a_checkpoint_is_said(call: Call, tmp_path: Path) -> None:
    failed = call("export", "--data", tmp_path / "none", tmp_path / "out")
    assert failed.exit_code == 1
    assert "none: no such folder" in failed.output
    (tmp_path / "none").mkdir()
    assert "belongs to no run yet" in call("export", "--data", tmp_path / "none", tmp_path / "out").output
    assert not (tmp_path / "out").exists()


@pytest.mark.processes
def test_it_works_while_the_daemon_saves_one_round_after_the_other(call: Call, run: Run, tmp_path: Path) -> None:
    alpha = run.sites[0]
    for number in range(5):
        before, done = alpha.round, call("export", "--data", alpha.folder, tmp_path / "out")
        assert done.exit_code == 0, done.output
        exported = int(done.output.split("round ")[1].split()[0])
        assert before <= exported + 1
        assert import_weights(tmp_path / "out")[1].isfinite().all()
        alpha.reach(before + 1 + number % 2)


def test_a_site_that_holds_a_stage_says_who_has_the_model(call: Call, tmp_path: Path) -> None:
    tables = {**TABLES, "pipeline": {"stages": 2}}
    (tmp_path / "site").mkdir()
    save_run(tmp_path / "site", RunConfig.model_validate(tables))
    failed = call("export", "--data", tmp_path / "site", tmp_path / "out")
    assert failed.exit_code == 1
    assert "its site holds one stage of it" in failed.output
    assert "Sites of stage 0 join the stages" in failed.output


BYTES = ByteTokenizer()


def test_it_goes_on_from_the_prompt(call: Call, site: Path) -> None:
    done = call("generate", "--data", site, "def main", "--tokens", "20", "--temperature", "0")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("def main")
    assert done.output.endswith("\n")
    assert done.output == call("generate", "--data", site, "def main", "--tokens", "20", "--temperature", "0").output


def test_the_seed_decides(call: Call, site: Path) -> None:
    first, again, other = (call("generate", "--data", site, "x", "--seed", seed).output for seed in (1, 1, 2))
    assert first == again != other


def test_a_model_folder_says_what_its_site_says(call: Call, site: Path, tmp_path: Path) -> None:
    weights = newest_weights(site)
    export(weights.config, weights.flat, tmp_path / "model")
    words = ["generate", "pier ", "--tokens", "30", "--top-k", "5", "--seed", "3"]
    assert call(*words, "--data", site).output == call(*words, "--model", tmp_path / "model").output


def test_an_empty_prompt_is_said(call: Call, site: Path) -> None:
    failed = call("generate", "--data", site, "")
    assert failed.exit_code == 1
    assert "prompt is empty" in failed.output


@pytest.mark.parametrize("prompt", ["caf\udce9", "\udcff"])
def test_a_prompt_that_is_no_text_is_said(call: Call, site: Path, prompt: str) -> None:
    failed = call("generate", "--data", site, prompt)
    assert failed.exit_code == 1
    assert "the prompt is not UTF-8" in failed.output


def test_next_to_no_temperature_takes_the_likeliest(call: Call, site: Path) -> None:
    cold = [call("generate", "--data", site, "x", "--tokens", "9", "--temperature", it) for it in ("0", "1e-300")]
    assert cold[0].exit_code == cold[1].exit_code == 0, cold[1].output
    assert cold[0].output == cold[1].output


@pytest.mark.parametrize(
    "option", [("--tokens", "-1"), ("--temperature", "-0.5"), ("--device", "warp"), ("--seed", str(2**70))]
)
def test_options_out_of_bounds_are_said(call: Call, site: Path, option: tuple[str, str]) -> None:
    failed = call("generate", "--data", site, "x", *option)
    assert failed.exit_code != 0
    assert option[0] in failed.output


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


def test_a_model_that_has_diverged_is_measured(call: Call, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (model, evaluate):
        monkeypatch.setattr(module, "validation_loss", lambda *_: 1000.0)
    for more in ([], ["--skip", "0.5"]):
        done = call("evaluate", "--data", site, *more)
        assert (done.exit_code, "inf" in done.output) == (0, True), done.output


def test_a_model_folder_is_measured_on_the_same_text(call: Call, site: Path, tmp_path: Path) -> None:
    weights = newest_weights(site)
    export(weights.config, weights.flat, tmp_path / "model")
    of_site, of_model = (
        json.loads(call("evaluate", "--data", site, "--json", *more).output)
        for more in ([], ["--model", tmp_path / "model"])
    )
    assert of_model["round"] is None
    assert of_model["loss"] == pytest.approx(of_site["loss"], abs=1e-6)


def test_a_model_that_can_read_more_is_measured_as_it_was_trained(call: Call, site: Path, tmp_path: Path) -> None:
    call("export", "--data", site, tmp_path / "out")
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(about | {"max_position_embeddings": 1 << 20}))
    mine, longer = (
        json.loads(call("evaluate", "--data", site, "--json", *more).output)
        for more in ((), ("--model", tmp_path / "out"))
    )
    assert longer["loss"] == pytest.approx(mine["loss"])


def test_a_model_with_another_tokenizer_is_not_measured(call: Call, site: Path, tmp_path: Path) -> None:
    call("export", "--data", site, tmp_path / "out")
    library = Tokenizer(models.WordLevel({"pier": 0, "?": 1}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "out" / "tokenizer.json"))
    failed = call("evaluate", "--data", site, "--model", tmp_path / "out")
    assert failed.exit_code == 1
    assert "has another tokenizer than the run" in failed.output


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


def test_what_each_stage_is_worth(call: Call, site: Path, tmp_path: Path) -> None:
    whole = json.loads(call("evaluate", "--data", site, "--json").output)["loss"]
    done = call("evaluate", "--data", site, "--skip", "0.5", "--json", "--plot", tmp_path / "omission.png")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert [it["stages"] for it in found["any"]] == [[1]]
    assert [it["stages"] for it in found["the last"]] == [[1]]
    assert found["nothing"][0]["loss"] == pytest.approx(whole)
    assert found["any"][0]["loss"] != pytest.approx(whole, abs=1e-7)
    assert (tmp_path / "omission.png").stat().st_size > 1000


def test_people_read_a_table(call: Call, site: Path) -> None:
    done = call("evaluate", "--data", site, "--skip", "0.5")
    assert done.output.startswith("Round 3 of run 'small', 2 stages; left out:\n")
    assert "1 of 2 left out, in the mean: perplexity" in done.output
