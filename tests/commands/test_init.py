from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from tokenizers import Tokenizer, models
from trainer.hub_cases import made

from pier_node.base.errors import PierError
from pier_node.commands.init import LEAST_LOSS
from pier_node.config.run import RunConfig, load
from pier_node.doctor import machine
from pier_node.outer.layout import Layout

Call = Callable[..., Result]


def test_it_writes_run_toml_where_one_is(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("init")
    assert done.exit_code == 0
    assert "\n  pier-node start\n" in done.output
    assert load(tmp_path / "run.toml") == RunConfig.model_validate({"outer": LEAST_LOSS})


def test_what_had_the_lowest_loss_is_chosen_however_long_the_run_is(call: Call, tmp_path: Path) -> None:
    for steps in ("5000", "50000"):
        assert call("init", tmp_path / steps, "--steps", steps).exit_code == 0
        outer = load(tmp_path / steps).outer
        assert (outer.algorithm, outer.start, outer.momentum) == ("diloco", "solo", 0.8)
        assert "had the lowest loss" in prose(tmp_path / steps)


def test_a_program_takes_what_it_writes_once_the_start_is_changed_as_its_refusal_says(
    call: Call, tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    assert call("init", str(path), "--sites", "2").exit_code == 0
    program = '\n[program]\nstep_tokens = 8\ntensors = ["weight 2x3"]\n'
    written = path.read_text() + program
    path.write_text(written)
    with pytest.raises(PierError, match=r'write start = "none" in \[outer\]'):
        load(path)
    path.write_text(written.replace('start = "solo"', 'start = "none"'))
    assert load(path).outer.start == "none"


def test_the_number_of_sites_need_not_be_edited(call: Call, tmp_path: Path) -> None:
    done = call("init", tmp_path / "two.toml", "--sites", "2")
    assert load(tmp_path / "two.toml").run.sites == 2
    assert "It is for 2 sites." in done.output
    assert f"\n  pier-node start --run {tmp_path / 'two.toml'}\n" in done.output


def test_the_next_command_can_be_copied_whatever_the_file_is_called(call: Call, tmp_path: Path) -> None:
    done = call("init", tmp_path / "my run.toml")
    assert f"\n  pier-node start --run '{tmp_path / 'my run.toml'}'\n" in done.output


@pytest.mark.parametrize(
    ("mbit", "rtt", "chosen", "keys"),
    [
        ("1000", "100", "as they are (fp32)", ("none", False, 1)),
        ("20", "1", "int4", ("int4", False, 1)),
        ("20", "100", "int4, while sites train", ("int4", True, 5)),
        ("2", "1", "int4, while sites train", ("int4", True, 5)),
    ],
)
def test_the_pace_of_the_slowest_site_chooses_how_updates_travel(
    call: Call, tmp_path: Path, mbit: str, rtt: str, chosen: str, keys: tuple[str, bool, int]
) -> None:
    done = call("init", tmp_path / "run.toml", "--sites", "2", "--pace", mbit, "0.05", "--rtt", rtt)
    outer = load(tmp_path / "run.toml").outer
    assert (outer.codec, outer.overlap, outer.fragments) == keys
    assert (outer.algorithm, outer.momentum) == (LEAST_LOSS["algorithm"], LEAST_LOSS["momentum"])
    assert f"Chosen: {chosen}." in done.output
    assert f"Updates travel {chosen}: chosen for {mbit} Mbit/s and 0.05 s an inner step." in prose(
        tmp_path / "run.toml"
    )
    assert max(map(len, done.output.split("Chosen")[0].splitlines()[1:])) <= 80


@pytest.mark.parametrize(("words", "trip"), [((), 0.1), (("--rtt", "250"), 0.25), (("--rtt", "0"), 0.0)])
def test_a_prediction_is_that_of_bytes_over_the_line_and_of_round_trips(
    call: Call, tmp_path: Path, words: tuple[str, ...], trip: float
) -> None:
    done = call("init", tmp_path / "run.toml", "--sites", "2", "--pace", "8", "0.1", *words)
    [plain] = [line for line in done.output.splitlines() if "fp32" in line and "%" in line]
    parameters = Layout.of(load(tmp_path / "run.toml").model).length
    exchange = 4 * parameters / 1e6 + 2 * trip  # each of two sites sends half of its update, and half of the mean
    assert f"{exchange:.3g} s" in plain
    assert f"{100 * 5 / (5 + exchange):.0f} %" in plain
    [five] = [line for line in done.output.splitlines() if "while sites train  " in line]
    apart = 4 * parameters / 1e6 * 4.25 / 32 + 5 * 2 * trip
    assert f"{apart:.3g} s" in five or f"{1000 * apart:.0f} ms" in five, "each of five fragments has a round of its own"


def test_a_round_trip_is_part_of_a_pace(call: Call, tmp_path: Path) -> None:
    failed = call("init", tmp_path / "run.toml", "--sites", "2", "--rtt", "80")
    assert failed.exit_code
    assert "Give --pace, too" in failed.output


def test_a_result_that_comes_late_costs_loss(call: Call, tmp_path: Path) -> None:
    for mbit, loss in (("5", "+0.3 %"), ("0.5", "+1.3 %")):
        done = call("init", tmp_path / mbit, "--sites", "2", "--pace", mbit, "0.05", "--rtt", "0")
        [row] = [line for line in done.output.splitlines() if "while sites train" in line and "Chosen" not in line]
        assert row.endswith(loss)


@pytest.mark.parametrize(("sites", "said"), [("4", False), ("16", True)])
def test_more_sites_than_were_measured_are_said_to_lose_more(
    call: Call, tmp_path: Path, sites: str, said: bool
) -> None:
    done = call("init", tmp_path / "run.toml", "--sites", sites, "--pace", "8", "0.1")
    assert ("With 16 sites it was 2 % higher." in done.output) == said


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (("--sites", "8", "--pace", "1000", "1"), "sync"),  # seconds of a step of the start: 1.1 together, alone 8
        (("--sites", "4", "--pace", "1000", "1"), "sync"),
        (("--sites", "2", "--pace", "1000", "1"), "solo"),  # together never takes half of the two seconds
        (("--sites", "8", "--pace", "10", "1"), "solo"),  # 5.8 s on the line at each step
        (("--sites", "4", "--pace", "100000", "0.02"), "solo"),  # a round alone takes longer than four such steps
        (("--sites", "8", "--pace", "1000", "1", "--optimizer", "muon"), "solo"),
    ],
)
def test_sites_start_together_where_that_takes_half_the_time_of_one_alone(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], start: str
) -> None:
    monkeypatch.setattr(machine, "measured", lambda *_: 0.05)
    done = call("init", tmp_path / "run.toml", *words)
    assert load(tmp_path / "run.toml").outer.start == start
    for written in (" ".join(done.output.split()), prose(tmp_path / "run.toml")):
        assert ("a synchronous start takes at most half of the time" in written) is (start == "sync")
    assert ("a synchronous start and these" in prose(tmp_path / "run.toml")) is (start == "sync")


def test_a_synchronous_start_shortens_the_predicted_run(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of 1,000 steps takes 800 s alone, and together 100 steps of 1 + 0.056 + 0.1 + 0.5 s."""
    monkeypatch.setattr(machine, "measured", lambda *_: 0.5)
    words = ("--sites", "8", "--steps", "1000", "--pace", "1000", "1")
    done = call("init", tmp_path / "run.toml", *words)
    rows = [line for line in done.output.splitlines() if line.startswith("  ")]
    assert [f"{minutes} min" in row for minutes, row in zip((18, 28, 28), rows[1:4])] == [True] * 3
    monkeypatch.setattr(machine, "measured", lambda *_: 3.5)
    assert call("init", tmp_path / "slow.toml", *words).exit_code == 0
    assert load(tmp_path / "slow.toml").outer.start == "solo"


def test_a_pace_needs_sites(call: Call, tmp_path: Path) -> None:
    failed = call("init", tmp_path / "run.toml", "--pace", "8", "0.1")
    assert failed.exit_code == 1
    assert "--sites" in failed.output
    assert not (tmp_path / "run.toml").exists()


@pytest.mark.parametrize(("steps", "values"), [("5000", (0.6, 0.9, "anneal")), ("50000", (0.8, 0.8, "anneal"))])
def test_muon_has_the_outer_values_that_were_best_for_it(
    call: Call, tmp_path: Path, steps: str, values: tuple[float, float, str]
) -> None:
    words = ("--optimizer", "muon", "--sites", "2", "--pace", "8", "0.1", "--steps", steps)
    done = call("init", tmp_path / "run.toml", *words)
    config = load(tmp_path / "run.toml")
    assert config.inner.optimizer == "muon"
    assert (config.outer.momentum, config.outer.lr, config.outer.schedule) == values
    assert "With Muon it was about 4 % lower." in done.output


@pytest.mark.parametrize(
    ("words", "sites", "microbatches", "sequences"),
    [
        (["--stages", "2"], 2, 8, 2),
        (["--stages", "4", "--sites", "6"], 6, 8, 6),
        (["--stages", "5", "--sites", "10"], 10, 10, 8),
        (["--stages", "3", "--preset", "llama-125m"], 3, 48, 8),
    ],
)
def test_a_pipeline_has_the_batch_of_replicas_and_sends_int8(
    call: Call, tmp_path: Path, words: list[str], sites: int, microbatches: int, sequences: int
) -> None:
    done = call("init", tmp_path / "run.toml", *words)
    assert done.exit_code == 0
    assert f"{microbatches} microbatches of {sequences} sequences visit all {words[1]} stages" in done.output
    config = load(tmp_path / "run.toml")
    stages = config.pipeline
    assert (config.run.sites, stages.stages, stages.path_length) == (sites, int(words[1]), int(words[1]))
    assert (stages.microbatches, config.inner.batch_size) == (microbatches, sequences)
    assert (stages.activation_codec, stages.gradient_codec) == ("int8", "int8")
    assert config.outer.algorithm == "sync"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--stages", "6"], "the model's 5 blocks"),
        (["--stages", "4", "--sites", "3"], "more than there are sites: 3"),
        (["--stages", "2", "--pace", "8", "0.1"], "--pace is for sites that train the whole model"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused(call: Call, tmp_path: Path, words: list[str], why: str) -> None:
    failed = call("init", tmp_path / "run.toml", *words)
    assert failed.exit_code == 1
    assert why in failed.output
    assert not (tmp_path / "run.toml").exists()


@pytest.mark.parametrize(("steps", "schedule", "part"), [(20_000, "constant", 10), (100_000, "anneal", 100)])
def test_a_run_of_many_rounds_is_annealed(call: Call, tmp_path: Path, steps: int, schedule: str, part: int) -> None:
    assert call("init", tmp_path / "run.toml", "--steps", steps).exit_code == 0
    config = load(tmp_path / "run.toml")
    assert config.outer.schedule == schedule
    assert config.inner.lr == pytest.approx(part * config.inner.min_lr)
    assert ("annealed at the end" in prose(tmp_path / "run.toml")) == (schedule == "anneal")
    assert config.outer.start_fraction == (0.02 if schedule == "anneal" else 0.1)


def test_a_start_lasts_at_least_twice_the_warmup(call: Call, tmp_path: Path) -> None:
    call("init", tmp_path / "run.toml", "--preset", "llama-125m", "--steps", "50000")
    config = load(tmp_path / "run.toml")
    assert config.outer.start_fraction * config.inner.total_steps == 2 * config.inner.warmup_steps


def prose(path: Path) -> str:
    return " ".join(path.read_text().replace("#   ", "").split())


def test_a_preset_is_taken(call: Call, tmp_path: Path) -> None:
    assert call("init", tmp_path / "big.toml", "--preset", "gpt2-xl").exit_code == 0
    assert load(tmp_path / "big.toml").model.layers == 48


@pytest.mark.parametrize("preset", ["llama-125m", "llama-1b", "llama-7b", "gpt2-small", "gpt2-xl"])
def test_a_model_of_some_size_is_trained_as_such_a_model_is(call: Call, tmp_path: Path, preset: str) -> None:
    done = call("init", tmp_path / "run.toml", "--preset", preset)
    assert "Put the tokenizer.json of " in done.output
    config = load(tmp_path / "run.toml")
    inner, parameters = config.inner, Layout.of(config.model).length
    assert config.data.tokenizer == "tokenizer.json"
    assert inner.lr == pytest.approx(inner.min_lr * 100)
    assert inner.beta2 == 0.95
    assert inner.lr < RunConfig().inner.lr
    assert inner.batch_size % inner.micro_batch == 0
    tokens = inner.total_steps * 4 * inner.batch_size * config.model.context
    assert tokens == pytest.approx(20 * parameters, rel=0.02)


def test_a_preset_that_does_not_exist_is_refused_with_those_that_do(call: Call, tmp_path: Path) -> None:
    failed = call("init", tmp_path / "run.toml", "--preset", "gpt9")
    assert failed.exit_code == 2
    assert "llama-1m" in failed.output
    assert not (tmp_path / "run.toml").exists()


def test_what_exists_is_not_overwritten_unless_forced(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("mine")
    failed = call("init", path)
    assert failed.exit_code == 1
    assert "--force" in failed.output
    assert path.read_text() == "mine"
    assert call("init", path, "--force").exit_code == 0
    assert load(path).outer.algorithm == LEAST_LOSS["algorithm"]


def test_a_folder_that_does_not_exist_is_said(call: Call, tmp_path: Path) -> None:
    failed = call("init", tmp_path / "no" / "run.toml")
    assert failed.exit_code == 1
    assert "No such file or directory" in failed.output


def test_steps_take_the_place_of_a_recipes(call: Call, tmp_path: Path) -> None:
    assert call("init", tmp_path / "run.toml", "--preset", "llama-7b", "--steps", "500").exit_code == 0
    inner = load(tmp_path / "run.toml").inner
    assert (inner.total_steps, inner.warmup_steps, inner.batch_size) == (500, 50, 256)


def test_a_tokenizer_comes_with_its_hash(call: Call, tmp_path: Path) -> None:
    made("qwen2", tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    Tokenizer(models.WordLevel({"pier": 0}, unk_token="pier")).save(str(file))
    assert call("init", tmp_path / "run.toml", "--from", tmp_path / "model").exit_code == 0
    data = load(tmp_path / "run.toml").data
    assert (data.tokenizer, data.tokenizer_hash) == (str(file), hashlib.sha256(file.read_bytes()).hexdigest())
    file.write_text("{}")
    failed = call("init", tmp_path / "other.toml", "--from", tmp_path / "model")
    assert failed.exit_code == 1
    assert "not a tokenizer.json" in " ".join(failed.output.split())


def test_a_model_that_transformers_knows_comes_with_its_config_and_layout(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made("qwen2", tmp_path / "model", max_position_embeddings=4096)
    done = call("init", tmp_path / "run.toml", "--from", tmp_path / "model", "--sites", "2")
    assert done.exit_code == 0, done.output
    section = load(tmp_path / "run.toml").model
    assert section.transformers
    assert section.transformers.kind == "qwen2"
    assert section.transformers.content["num_hidden_layers"] == 2
    assert Layout.of(section).length == sum(each.numel() for each in model.parameters())
    assert section.context == 1024  # not all that it could read
    assert (section.vocab_size, section.dim, section.heads, section.kv_heads, section.layers) == (61, 32, 4, 2, 2)
    assert f"--from {tmp_path / 'model'}" in done.output
    assert load(tmp_path / "run.toml").data.tokenizer == "bytes"  # the folder has none
    inner = load(tmp_path / "run.toml").inner
    assert (inner.micro_batch, inner.lr, inner.min_lr) == (0, 2e-5, 2e-6)
    assert "Its learning rate is 2e-05" in done.output
    made("qwen2", tmp_path / "words", max_position_embeddings=4096, vocab_size=1 << 16)
    assert call("init", tmp_path / "words.toml", "--from", tmp_path / "words").exit_code == 0
    assert load(tmp_path / "words.toml").inner.micro_batch == 1  # of logits there would be gigabytes
    monkeypatch.setattr("pier_node.trainer.model.hub.find_spec", lambda _name: None)
    failed = call("init", tmp_path / "other.toml", "--from", tmp_path / "model")
    assert failed.exit_code == 1
    assert "pip install transformers" in " ".join(failed.output.split())
    assert not (tmp_path / "other.toml").exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model_type": "no_such"}, "no_such"),
        ({"model_type": "t5"}, "a t5 is more than a decoder of text"),
        ({"model_type": "gemma3"}, "more than a decoder of text"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"num_hidden_layers": 100_000, "layer_types": None}, "num_hidden_layers is 100000; at most 4096 are allowed"),
        ({"num_attention_heads": "many"}, "Field 'num_attention_heads'"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(
    call: Call, tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    made("qwen2", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changed}))
    failed = call("init", tmp_path / "run.toml", "--from", tmp_path / "model")
    assert failed.exit_code == 1, failed.output
    assert words in " ".join(failed.output.split())
    assert not (tmp_path / "run.toml").exists()
