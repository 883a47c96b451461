from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from pier_node.cli import main
from pier_node.config.run import RunConfig, load
from pier_node.trainer.data.corpus import open_corpus


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"text {number}, " * 5)
    return folder


def write_run(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(f"[model]\ncontext = 16\n{text}")
    return path


def call(run: Path, out: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["tokenize", str(out), "--run", str(run), *words])


def said_config(output: str) -> RunConfig:
    return RunConfig.model_validate(tomllib.loads(output.partition("In run.toml:")[2]))


def test_what_it_writes_is_what_a_site_would_have_made(tmp_path: Path, texts: Path) -> None:
    run = write_run(tmp_path, f'[data]\nsource = "text"\npath = "{texts}"\nvalidation = 0.2\n')
    done = call(run, tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "tokens to train on and" in done.output
    assert "in 2 shards" in done.output
    own = open_corpus(load(run).data, 0, 1, None, tmp_path / "cache")
    given = open_corpus(said_config(done.output).data, 0, 1, None, tmp_path / "unused")
    assert np.array_equal(np.asarray(own.train), np.asarray(given.train))
    assert np.array_equal(np.asarray(own.validation), np.asarray(given.validation))
    assert not (tmp_path / "unused").exists(), "tokens are read where they are"
    again = call(run, tmp_path / "out")
    assert "has all of these tokens" in again.output


def test_a_folder_may_have_any_letters_in_its_name(tmp_path: Path, texts: Path) -> None:
    run, out = write_run(tmp_path, f'[data]\nsource = "text"\npath = "{texts}"\nvalidation = 0.2\n'), tmp_path / "é 😀"
    assert said_config(call(run, out).output).data.path == str(out)


def test_a_broken_line_is_named_and_what_is_there_belongs_to_one_text(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "some.jsonl").write_text('{"text": "one"}\n' * 30 + "broken\n")
    run = write_run(tmp_path, f'[data]\nsource = "jsonl"\npath = "{tmp_path / "some.jsonl"}"\nvalidation = 0.5\n')
    failed = call(run, tmp_path / "out")
    assert failed.exit_code == 1
    assert "some.jsonl, line 31: not JSON" in failed.output
    (tmp_path / "other.jsonl").write_text('{"text": "one"}\n' * 300)
    other = call(run, tmp_path / "out", "--dataset", str(tmp_path / "other.jsonl"))
    assert other.exit_code == 1
    assert "was not made from this text" in other.output
    (tmp_path / "out" / "manifest.json").write_text("{")
    assert "manifest.json is not JSON" in call(run, tmp_path / "out").output


def test_what_a_full_disk_left_of_a_manifest_is_no_reason_to_refuse(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json.tmp").write_text("{")
    run = write_run(tmp_path, f'[data]\nsource = "text"\npath = "{texts}"\n')
    assert call(run, tmp_path / "out").exit_code == 0


def test_text_that_no_run_could_use_is_refused_before_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("four")
    run = write_run(tmp_path, f'[data]\nsource = "text"\npath = "{tmp_path / "few.txt"}"\n')
    done = call(run, tmp_path / "out")
    assert done.exit_code == 1
    assert "the data to train on here has 5 tokens; one window of model.context = 16 needs 17" in done.output
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_else_is_refused(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "out").mkdir()
    np.save(tmp_path / "out" / "precious.npy", np.arange(3))
    done = call(write_run(tmp_path, f'[data]\nsource = "text"\npath = "{texts}"\n'), tmp_path / "out")
    assert done.exit_code == 1
    assert "is not empty" in done.output
    assert (tmp_path / "out" / "precious.npy").exists()


def test_a_mixture_gets_a_folder_for_each_source(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "some.jsonl").write_text("".join(json.dumps({"text": f"line {n} " * 9}) + "\n" for n in range(50)))
    run = write_run(
        tmp_path,
        f"""[data]
        validation = 0.2
        [[data.mixture]]
        source = "text"
        path = "{texts}"
        weight = 3
        [[data.mixture]]
        source = "jsonl"
        path = "{tmp_path / "some.jsonl"}"
        """,
    )
    done = call(run, tmp_path / "out")
    assert done.exit_code == 0, done.output
    data = said_config(done.output).data
    assert [part.weight for part in data.mixture] == [0.75, 0.25]
    given, own = open_corpus(data, 0, 1, None, tmp_path), open_corpus(load(run).data, 0, 1, None, tmp_path / "cache")
    for one, other in zip(given.parts, own.parts, strict=True):
        assert np.array_equal(np.asarray(one.train), np.asarray(other.train))
        assert one.weight == other.weight
    assert "has tokens already" in call(write_run(tmp_path, done.output.partition("toml:")[2]), tmp_path).output
