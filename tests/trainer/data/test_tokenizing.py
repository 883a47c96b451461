from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from pier_node.base.errors import PierError
from pier_node.config.run import DataSection
from pier_node.trainer.data import tokenizing as module
from pier_node.trainer.data.corpus import open_corpus
from pier_node.trainer.data.shards import Split, TokenManifest, count, opened
from pier_node.trainer.data.tokenizing import Batch, Text, batches, cached, encoded, tokenize, whole


def word_tokenizer(path: Path, words: int = 400) -> str:
    library = Library(models.WordLevel({f"w{n}": n for n in range(words)} | {"</s>": words}, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(path))
    return str(path)


def section_of(folder: Path, documents: int, words: int = 5, **keys: Any) -> DataSection:
    folder.mkdir(exist_ok=True)
    lines = [" ".join(f"w{(7 * number + word) % 400}" for word in range(words)) for number in range(documents)]
    (folder / "some.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return DataSection(
        source="jsonl",
        path=str(folder / "some.jsonl"),
        tokenizer=word_tokenizer(folder / "tokenizer.json"),
        validation=0.2,
        **keys,
    )


def tokens(folder: Path, manifest: TokenManifest, split: Split) -> Any:
    files = manifest.files(folder, split)
    return np.asarray(opened(files, 0, count(files)))


def silent(read: int, size: int) -> None:
    pass


class Killed(BaseException):
    """Stands for the end of the process."""


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 60), st.lists(st.integers(0, 40), max_size=4), st.integers(1, 60), st.integers(1, 3))
def test_tokens_are_the_same_wherever_it_was_killed(
    tmp_path_factory: pytest.TempPathFactory, documents: int, kills: list[int], shard: int, slots: int
) -> None:
    """Killed after any batches, any number of times, with shards of any size."""
    tmp_path = tmp_path_factory.mktemp("tokens")
    text = Text.of(section_of(tmp_path / "text", documents), 1, slots, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHARD", shard)
        patch.setattr(module, "BATCH", 3)
        straight = tokenize(text, tmp_path / "straight", silent)
        for kill in kills:

            def dying(text: Text, found: Any, processes: int, left: int = kill) -> Any:
                for number, step in enumerate(encoded(text, found, processes)):
                    if number == left:
                        raise Killed
                    yield step

            with patch.context() as once:
                once.setattr(module, "encoded", dying)
                try:
                    tokenize(text, tmp_path / "killed", silent)
                except Killed:
                    assert whole(tmp_path / "killed", text.key()) is None
        resumed = tokenize(text, tmp_path / "killed", silent)
    splits: tuple[Split, ...] = ("train", "validation")
    for split in splits:
        expected = tokens(tmp_path / "straight", straight, split)
        assert tokens(tmp_path / "killed", resumed, split).tolist() == expected.tolist()
    assert (resumed.documents, resumed.read) == (straight.documents, straight.read)
    assert whole(tmp_path / "killed", text.key()) == resumed


def test_a_resumed_run_encodes_only_what_follows_the_last_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SHARD", 60)
    monkeypatch.setattr(module, "BATCH", 5)
    text, batched = Text.of(section_of(tmp_path / "text", 100), 0, 1, None), list[Batch]()

    def watched(text: Text, found: Any, processes: int) -> Any:
        for batch, some in encoded(text, found, processes):
            if len(batched) == 10:
                batched.append(batch)
                raise PierError("enough")
            batched.append(batch)
            yield batch, some

    monkeypatch.setattr(module, "encoded", watched)
    with pytest.raises(PierError, match="enough"):
        tokenize(text, tmp_path / "out", silent)
    begun = TokenManifest.load(tmp_path / "out")
    assert not begun.complete
    assert 0 < begun.documents <= 50
    on_disk = {path.name for path in (tmp_path / "out").glob("*.npy")}
    assert on_disk == {shard.name for shard in (*begun.train, *begun.validation)}, "unfinished shards are removed"
    with caplog.at_level(logging.INFO):
        tokenize(text, tmp_path / "out", silent)
    assert "continues after" in caplog.text
    assert batched[11].documents == begun.documents + 5


def test_several_processes_give_the_same_tokens(tmp_path: Path) -> None:
    text = Text.of(section_of(tmp_path / "text", 700, 20), 1, 2, None)
    alone, pool = (tokenize(text, tmp_path / f"{number}", silent, number) for number in (0, 2))
    assert alone == pool
    assert tokens(tmp_path / "0", alone, "train").tolist() == tokens(tmp_path / "2", pool, "train").tolist()


def test_a_process_that_dies_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text.of(section_of(tmp_path / "text", 10), 0, 1, None)
    object.__setattr__(text, "config", text.config.model_copy(update={"tokenizer": "/nowhere/t.json"}))
    with pytest.raises(PierError, match="a process that tokenizes has died") as caught:
        list(encoded(text, batches(text, 0, silent), 1))
    assert "what is tokenized already is kept" in caught.value.remedy


def test_only_the_first_documents_count_with_a_limit(tmp_path: Path) -> None:
    text = Text.of(section_of(tmp_path / "text", 50, limit=8), 0, 1, None)
    assert tokenize(text, tmp_path / "out", silent).documents == 8


def test_keys_that_decide_nothing_keep_the_cache_and_those_that_do_make_another(tmp_path: Path) -> None:
    plain = section_of(tmp_path / "text", 5)

    def key(**changes: Any) -> str:
        return Text.of(plain.model_copy(update=changes), 0, 1, None).key()

    assert key() == key(dealt=False)
    assert len({key(), key(limit=3), key(split="test"), key(validation=0.1)}) == 4


@pytest.mark.parametrize("harm", ["", "damaged"])
def test_a_cache_that_an_older_version_made_is_used_unless_it_is_damaged(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = section_of(tmp_path / "text", 30)
    text = Text.of(config, 0, 1, None)
    cache = tmp_path / "cache"
    folder, manifest = cached(text, cache, silent)
    expected = tokens(folder, manifest, "train")
    checks = {}
    for shard in (*manifest.train, *manifest.validation):
        (folder / shard.name).rename(folder / shard.name.replace("-00000", ""))
        checks[shard.name.replace("-00000", "")] = shard.check + harm
    (folder / "manifest.json").unlink()
    (folder / "check.json").write_text(json.dumps(checks))
    (cache / "building-abc").mkdir()
    with caplog.at_level(logging.INFO):
        corpus = open_corpus(config, 0, 1, None, cache)
    assert np.asarray(corpus.train).tolist() == expected.tolist()
    said = "is damaged; it is made again" if harm else "tokens of an older version of Pier; they are used as they are"
    assert said in caplog.text
    assert ("train.npy" in [path.name for path in folder.iterdir()]) == (not harm)
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert whole(folder, text.key())


def test_the_key_is_that_of_older_versions(tmp_path: Path) -> None:
    """Of the five keys that [data] had, in their order."""
    import hashlib

    text = Text.of(config := section_of(tmp_path / "text", 5), 1, 3, None)
    old = json.dumps({k: getattr(config, k) for k in ("source", "path", "text_field", "tokenizer", "validation")})
    stat = Path(config.path).stat()
    files = [(str(Path(config.path).resolve()), "", stat.st_size, stat.st_mtime_ns)]
    terms = (1, old.replace('": ', '":').replace(', "', ',"'), text.tokenizer.fingerprint, 1, 3, files)
    assert text.key() == hashlib.sha256(repr(terms).encode()).hexdigest()[:32]


PROGRAM = """
import sys
from pathlib import Path
from pier_node.config.run import DataSection
from pier_node.trainer.data import tokenizing as module

if __name__ == "__main__":
    module.SHARD, module.BATCH = 3000, 50
    text = module.Text.of(DataSection.model_validate_json(sys.argv[1]), 0, 1, None)
    module.tokenize(text, Path(sys.argv[2]), lambda *_: None, int(sys.argv[3]))
"""


def wait_for(what: Callable[[], bool], program: subprocess.Popen[bytes]) -> bool:
    """Whether it is so before the program ends."""
    until = time.monotonic() + 100
    while time.monotonic() < until:
        if what():
            return True
        if program.poll() is not None:
            return False
        time.sleep(0.002)
    raise AssertionError("nothing happens")


def test_a_real_process_that_is_killed_continues_after_its_last_shard(tmp_path: Path) -> None:
    config, out = section_of(tmp_path / "text", 6000, 20), tmp_path / "out"
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), config.model_dump_json(), str(out)]
    text = Text.of(config, 0, 1, None)
    program = subprocess.Popen([*command, "1"], start_new_session=True)
    killed = wait_for(lambda: (out / "train-00002.npy").exists(), program)
    if killed:
        os.kill(program.pid, signal.SIGKILL)
    program.wait(60)
    begun = TokenManifest.load(out)
    assert begun.complete or begun.train
    straight = tokenize(text, tmp_path / "straight", silent)
    resumed = tokenize(text, out, silent)
    got, expected = (tokens(place, it, "train") for place, it in ((out, resumed), (tmp_path / "straight", straight)))
    assert got.tolist() == expected.tolist()
    assert resumed.train[: len(begun.train)] == begun.train, "finished shards stay"
