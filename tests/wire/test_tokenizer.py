"""The run's tokenizer.json: whoever joins gets the file that the run names, or none."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from pathlib import Path

import pytest
from pydantic import ValidationError

from pier_node.config.run import RunConfig, from_canonical
from pier_node.wire.carrier import CHUNK_BYTES, TOKENIZER_BYTES, BadMessage
from pier_node.wire.tokenizer import Ask, fetch, keep, located, part
from pier_proto.v1.peer_pb2 import TokenizerPart, TokenizerRequest

CONTENT = random.Random(1).randbytes(2 * CHUNK_BYTES + 7)


def of(path: Path | str, content: bytes = CONTENT) -> RunConfig:
    digest = hashlib.sha256(content).hexdigest()
    return RunConfig.model_validate({"data": {"tokenizer": str(path), "tokenizer_hash": digest}})


@pytest.fixture
def founder(tmp_path: Path) -> RunConfig:
    (tmp_path / "gemma.json").write_bytes(CONTENT)
    return of(tmp_path / "gemma.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "site").mkdir()
    return tmp_path / "site"


def serving(config: RunConfig, asked: list[int]) -> Ask:
    async def ask(request: TokenizerRequest) -> TokenizerPart:
        asked.append(request.offset)
        return part(config, request)

    return ask


def test_a_site_that_has_no_such_file_gets_it_in_parts(
    founder: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    config, asked = from_canonical(founder.canonical()), list[int]()
    assert located(config, folder) is None
    got = asyncio.run(fetch(config, folder, serving(founder, asked)))
    assert asked == [0, CHUNK_BYTES, 2 * CHUNK_BYTES]
    assert Path(got.data.tokenizer).read_bytes() == CONTENT
    assert Path(got.data.tokenizer).is_absolute()
    assert located(config, folder) == got
    assert got.hash() == config.hash() == founder.hash()  # wherever each has it


def test_a_file_that_is_here_is_copied_if_it_is_the_runs(founder: RunConfig, folder: Path, tmp_path: Path) -> None:
    assert located(founder, folder) == founder
    assert not [*folder.iterdir()], "nothing is written"
    kept = keep(founder, folder)
    assert kept
    assert kept.data.tokenizer == str(folder / "tokenizer.json")
    assert keep(kept, folder) == kept
    Path(founder.data.tokenizer).write_bytes(b"changed since")
    assert located(founder, folder) == kept
    other, brought = of(tmp_path / "nowhere", b"of another run"), tmp_path / "brought.json"
    assert located(other, folder) is keep(other, folder) is None
    brought.write_bytes(b"of another run")
    assert located(other, folder, [brought]) == other.with_tokenizer(str(brought))
    keep(other, folder, [brought])
    assert (folder / "tokenizer.json").read_bytes() == b"of another run"


def test_what_lies_beside_the_file_is_copied_with_it(founder: RunConfig, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("of another run")
    keep(founder, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_nobody_else_says_which_file_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is no part of the run's hash: whoever is asked for the configuration could name any."""
    monkeypatch.chdir(folder)
    os.mkfifo(folder / "tokenizer.json")
    for path in ("/dev/zero", "~nobody/x", "\0", str(folder / "pipe")):
        sent = json.dumps({**json.loads(of("x").canonical()), "data": {**of(path).data.model_dump(mode="json")}})
        config = from_canonical(sent)
        assert (config.data.tokenizer, config.hash()) == ("tokenizer.json", of("x").hash())
        assert located(config, folder) is None


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (TokenizerPart(data=bytes(len(CONTENT)), size=len(CONTENT)), "bytes from byte 0 on"),
        (TokenizerPart(data=b"x", size=len(CONTENT)), "1 bytes from byte 0 on"),  # it would take for ever
        (TokenizerPart(data=bytes(CHUNK_BYTES), size=TOKENIZER_BYTES + 1), "of a tokenizer.json of 67108865"),
        (TokenizerPart(data=b"another", size=7), "has another SHA-256"),
        (TokenizerPart(), "has another SHA-256"),
    ],
)
def test_nothing_else_is_taken(answer: TokenizerPart, why: str, folder: Path, tmp_path: Path) -> None:
    async def ask(_request: TokenizerRequest) -> TokenizerPart:
        return answer

    with pytest.raises(BadMessage, match=why):
        asyncio.run(fetch(of(tmp_path / "nowhere"), folder, ask))
    assert not [*folder.iterdir()]


def test_only_the_runs_file_is_sent(founder: RunConfig, tmp_path: Path) -> None:
    for config, offset, why in (
        (of(tmp_path / "nowhere"), 0, "not there either: No such file"),
        (founder, len(CONTENT), "no part from byte 2097159 on"),
        (RunConfig.model_validate({"data": {"tokenizer": founder.data.tokenizer}}), 0, "no tokenizer.json that"),
    ):
        with pytest.raises(BadMessage, match=why):
            part(config, TokenizerRequest(offset=offset))


def test_bytes_have_no_file() -> None:
    with pytest.raises(ValidationError, match="tokenizer_hash is of a tokenizer"):
        of("bytes")
