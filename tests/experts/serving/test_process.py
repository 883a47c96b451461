"""`pier-node serve` as a process, asked by the official Python client of the protocol."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import openai
import pytest

pytestmark = pytest.mark.processes

WAIT = 60.0
PROGRAM = str(Path(sys.executable).with_name("pier-node"))


@dataclass
class Server:
    """A process that serves; what it prints comes into `lines`, line by line."""

    process: subprocess.Popen[str]
    lines: Queue[str]

    def said(self, pattern: str) -> re.Match[str]:
        """The next line that has it."""
        while True:
            if found := re.search(pattern, self.lines.get(timeout=WAIT)):
                return found

    def client(self) -> openai.OpenAI:
        """A client; it does not try again."""
        address = self.said(r"base_url = (\S+),")[1]
        return openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=WAIT)


def _read(out: Iterable[str], lines: Queue[str]) -> None:
    for line in out:
        lines.put(line)


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with started("--experts", str(folder), "--top-k", "2", "--memory", "1") as made:
        yield made


@contextmanager
def started(*options: str) -> Iterator[Server]:
    words = [PROGRAM, "serve", "--listen", "127.0.0.1:0", *options]
    lines: Queue[str] = Queue()
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as made:
        assert made.stdout is not None
        reader = threading.Thread(target=_read, args=(made.stdout, lines))
        reader.start()
        yield Server(made, lines)
        made.kill()
        reader.join(WAIT)


@pytest.mark.smoke
def test_the_official_client_works_as_it_is(server: Server) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["mine", "topics", "encodings", "network"]
    told = client.completions.create(model="mine", prompt="import", max_tokens=10, seed=1, logprobs=1, stop=["\0"])
    choice = told.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert told.usage is not None
    assert told.usage.completion_tokens == 10
    posterior = (choice.model_extra or {})["posterior"]
    assert len(posterior) == 2
    assert sum(posterior.values()) == pytest.approx(1)
    parts = client.completions.create(model="mine", prompt="import", max_tokens=10, seed=1, stream=True)
    assert "".join(part.choices[0].text for part in parts) == choice.text
    with pytest.raises(openai.BadRequestError, match="best_of is not supported"):
        client.completions.create(model="mine", prompt="x", best_of=2)
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.completions.create(model="gpt-4", prompt="x")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_in_seconds_in_the_middle_of_an_answer(server: Server, number: signal.Signals) -> None:
    stream = server.client().completions.create(model="mine", prompt="x", max_tokens=4096, stream=True)
    next(iter(stream))
    server.process.send_signal(number)
    assert server.process.wait(30) == 0
    server.said("Stopped")


def test_a_model_is_served_like_an_ensemble(folder: Path) -> None:
    with started("--model", str(folder / "e0")) as server:
        client = server.client()
        told = client.completions.create(model="e0", prompt=["import", "def"], max_tokens=5, n=2)
        assert [choice.index for choice in told.choices] == [0, 1, 2, 3]
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="e0", messages=[{"role": "user", "content": "x"}])
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT) == 0


@pytest.mark.parametrize(("given", "inside", "right"), [("--model", "", "--experts"), ("--experts", "e0", "--model")])
def test_a_model_and_an_ensemble_are_told_apart(folder: Path, given: str, inside: str, right: str) -> None:
    place = folder / inside
    words = [PROGRAM, "serve", given, str(place), "--listen", "127.0.0.1:0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT, check=False)
    assert (done.returncode, f"give it as {right} {place}" in done.stderr) == (1, True)


def test_an_ensemble_none_of_whose_experts_is_whole_is_not_served(folder: Path) -> None:
    for number in range(3):
        (folder / f"e{number}" / "model.safetensors").write_bytes(b"\xff" * 100)
    words = [PROGRAM, "serve", "--experts", str(folder), "--listen", "127.0.0.1:0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT, check=False)
    assert done.returncode == 1
    assert f"{folder}: none of the experts can be loaded; the last: {folder / 'e2'}" in done.stderr
    assert "Collect the experts again" in done.stderr


def test_an_address_that_is_taken_is_said(server: Server, folder: Path) -> None:
    port = server.said(r"base_url = http://127.0.0.1:(\d+)/")[1]
    words = [PROGRAM, "serve", "--experts", str(folder), "--listen", f"127.0.0.1:{port}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT, check=False)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
