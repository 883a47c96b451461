"""A model that is named as on the Hugging Face hub; the hub is a server of our own, and the client is the real one."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from pier_node.config.run import RunConfig, load
from pier_node.trainer.model.export import export
from pier_node.trainer.model.initial import initial_weights

COMMIT = "c0ffee" * 6 + "c0ff"


class Hub(BaseHTTPRequestHandler):
    """What the hub answers about one model, which lies in `folder`."""

    folder: Path
    asked: set[str]

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        if self.path.startswith("/api/models/lab/tiny/tree/"):
            files = [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": path.name}
                for path in self.folder.iterdir()
            ]
            content = json.dumps(files).encode()
        elif self.path.startswith("/api/models/lab/tiny"):
            files = [{"rfilename": path.name} for path in self.folder.iterdir()]
            content = json.dumps({"id": "lab/tiny", "sha": COMMIT, "siblings": files}).encode()
        elif self.path.startswith(f"/lab/tiny/resolve/{COMMIT}/"):
            self.asked.add(self.path.rpartition("/")[2])
            content = (self.folder / self.path.rpartition("/")[2]).read_bytes()
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process that takes this server for the hub."""
    config = RunConfig.model_validate({"model": {"preset": "llama-tiny"}}).model
    Hub.folder, Hub.asked = export(config, initial_weights(config, seed=1), tmp_path / "uploaded"), set()
    (Hub.folder / "consolidated.safetensors").write_bytes(b"the same weights again")
    (Hub.folder / "pytorch_model.bin").write_bytes(b"a pickle")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        where = f"http://127.0.0.1:{server.server_address[1]}"
        kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(("HF_", "HTTP"))}
        yield {**kept, "HF_ENDPOINT": where, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
        server.shutdown()


def init(environment: dict[str, str], folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    words = [str(Path(sys.executable).parent / "pier-node"), "init", "--from", name]
    return subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


def test_a_model_of_the_hub_is_named(hub: dict[str, str], tmp_path: Path) -> None:
    done = init(hub, tmp_path, "lab/tiny")
    assert done.returncode == 0, done.stderr
    taken = load(tmp_path / "run.toml")
    assert taken.model.dim == RunConfig.model_validate({"model": {"preset": "llama-tiny"}}).model.dim
    snapshot = tmp_path / "cache" / "hub" / "models--lab--tiny" / "snapshots" / COMMIT
    assert f"--from {snapshot}" in done.stdout
    assert taken.data.tokenizer_hash == hashlib.sha256((Hub.folder / "tokenizer.json").read_bytes()).hexdigest()
    assert Hub.asked == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }  # nothing twice, and no pickle


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lab/nothing", "lab/nothing: there is no such folder, and the hub does not give it: "),
        ("nothing", "nothing: there is no such folder; models on the hub have names like Qwen/Qwen3-0.6B"),
    ],
)
def test_a_name_that_is_nowhere(hub: dict[str, str], tmp_path: Path, name: str, why: str) -> None:
    done = init(hub, tmp_path, name)
    assert done.returncode == 2
    assert why in " ".join(done.stderr.split())


def test_a_hub_that_cannot_be_reached(hub: dict[str, str], tmp_path: Path) -> None:
    done = init({**hub, "HF_ENDPOINT": "http://127.0.0.1:9"}, tmp_path, "lab/tiny")
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert "the hub does not give it: " in said
    assert "`hf download`" in said
