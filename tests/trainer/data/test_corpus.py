from __future__ import annotations

import json
import logging
import os
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from pier_node.base.errors import PierError
from pier_node.config.run import DataSection, RunConfig
from pier_node.trainer.data import tokenizing as module
from pier_node.trainer.data.corpus import Batch, Corpus, Part, SiteData, Windows, check_data, open_corpus, share
from pier_node.trainer.data.shards import Manifest, ShardWriter, Stream
from pier_node.trainer.data.sources import open_source

lines = st.lists(st.text(st.characters(codec="ascii", exclude_characters="\n"), min_size=1), min_size=1, max_size=30)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"text {number}")
    return folder


def open_slot(data: Path, cache: Path, slot: int = 0, slots: int = 3, **config: Any) -> Corpus:
    section = DataSection(**{"source": "text", "path": str(data), "validation": 0.2, **config})
    return open_corpus(section, slot, slots, None, cache)


def text_of(tokens: Any) -> bytes:
    return bytes(np.asarray(tokens))


def parts(tokens: Any) -> list[str]:
    return text_of(tokens).decode().splitlines()


def folder_of(cache: Path) -> Path:
    [folder] = cache.iterdir()
    return folder


def test_slots_and_validation_cover_everything_once(data: Path, tmp_path: Path) -> None:
    corpora = [open_slot(data, tmp_path / "cache", slot) for slot in range(3)]
    dealt = sum((parts(corpus.train) for corpus in corpora), parts(corpora[0].validation))
    assert sorted(dealt) == sorted(f"text {number}" for number in range(60))
    assert all(len(corpus.train) for corpus in corpora)
    for other in corpora[1:]:
        assert np.array_equal(other.validation, corpora[0].validation)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=lines, slots=st.integers(1, 5), validation=st.sampled_from([0.1, 0.5]))
def test_any_documents_are_dealt_once(tmp_path: Path, texts: list[str], slots: int, validation: float) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = {"source": "jsonl", "validation": validation}
    corpora = [open_slot(path, tmp_path / "cache", slot, slots, **config) for slot in range(slots)]
    counted = Counter(text_of(corpora[0].validation))
    for corpus in corpora:
        counted += Counter(text_of(corpus.train))
    assert counted == Counter("".join(text + "\n" for text in texts).encode())


def test_slots_wrap_around(data: Path, tmp_path: Path) -> None:
    first, again = (open_slot(data, tmp_path / "cache", slot) for slot in (1, 4))
    assert np.array_equal(first.train, again.train)
    folder_of(tmp_path / "cache")


def test_the_same_data_elsewhere_is_dealt_the_same(data: Path, tmp_path: Path) -> None:
    first = open_slot(data, tmp_path / "cache")
    data.rename(tmp_path / "moved")
    config = DataSection(source="text", path="/nowhere", validation=0.2)
    second = open_corpus(config, 0, 3, str(tmp_path / "moved"), tmp_path / "other")
    assert text_of(first.train) == text_of(second.train)
    assert text_of(first.validation) == text_of(second.validation)


def test_a_second_opening_reads_no_document(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_slot(data, tmp_path / "cache")
    monkeypatch.setattr(module, "tokenize", None)
    second = open_slot(data, tmp_path / "cache")
    assert all(isinstance(array, np.memmap) for array in second.train.arrays)
    assert text_of(second.train) == text_of(first.train)


@pytest.mark.parametrize(
    "config", [{"slot": 1}, {"slots": 4}, {"validation": 0.3}, {"path": "longer"}, {"path": "touched"}]
)
def test_whatever_matters_makes_another_cache(data: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    cache = tmp_path / "cache"
    open_slot(data, cache)
    change = config.get("path")
    if change == "longer":
        (data / "00.txt").write_text("text 0 and more")
    if change == "touched":
        os.utime(data / "00.txt", ns=(1, 1))
    open_slot(data, cache, **{key: value for key, value in config.items() if key != "path"})
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("name", ["train-00000.npy", "validation-00000.npy", "manifest.json"])
@pytest.mark.parametrize("harm", ["cut", "flip", "remove"])
def test_damage_is_found_and_mended(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, harm: str
) -> None:
    cache = tmp_path / "cache"
    before = text_of(open_slot(data, cache).train)
    path = folder_of(cache) / name
    content = path.read_bytes()
    path.unlink()
    if harm != "remove":
        path.write_bytes(content[:-3] if harm == "cut" else content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    with caplog.at_level(logging.WARNING):
        assert text_of(open_slot(data, cache).train) == before
    assert ("is damaged; it is made anew" in caplog.text) == ((name, harm) != ("manifest.json", "remove"))
    assert path.read_bytes() == content


def test_a_build_that_fails_leaves_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_the_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    cache = tmp_path / "cache"
    monkeypatch.setattr(ShardWriter, "append", fill_the_disk)
    with pytest.raises(PierError, match="No space left on device") as caught:
        open_slot(data, cache)
    assert "Free some space" in caught.value.remedy
    assert list(cache.iterdir()) == []


def test_of_several_processes_one_tokenizes_and_the_others_wait(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, tokenize, built = tmp_path / "cache", module.tokenize, list[Path]()
    with ThreadPoolExecutor() as pool:
        others: list[Future[Corpus]] = []

        def build(text: Any, folder: Path, told: Any) -> Manifest:
            built.append(folder)
            others.extend(pool.submit(open_slot, data, cache) for _ in range(3))
            assert not [other for other in others if other.done()]
            return tokenize(text, folder, told)

        monkeypatch.setattr(module, "tokenize", build)
        first = open_slot(data, cache)
        assert all(text_of(other.result(60).train) == text_of(first.train) for other in others)
    assert len(built) == 1
    folder_of(cache)


def test_one_that_does_not_tokenize_waits_for_the_tokens(data: Path, tmp_path: Path) -> None:
    cache, section = tmp_path / "cache", DataSection(source="text", path=str(data), validation=0.2)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(open_corpus, section, 0, 3, None, cache, tokenizes=False)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        assert not cache.exists()
        first = open_slot(data, cache)
        assert text_of(waiting.result(60).train) == text_of(first.train)


def test_what_a_killed_process_left_half_made_is_removed(data: Path, tmp_path: Path) -> None:
    left = tmp_path / "cache" / "building-abc"
    left.mkdir(parents=True)
    (left / "train.npy").write_text("half")
    open_slot(data, tmp_path / "cache")
    assert folder_of(tmp_path / "cache").name.startswith("corpus-")


def test_it_tells_how_far_it_is(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "tokenize", partial(module.tokenize, tell=0.0))
    told: list[tuple[int, int]] = []
    section = DataSection(source="text", path=str(data), validation=0.2)
    open_corpus(section, 0, 3, None, tmp_path / "cache", lambda *how_far: told.append(how_far))
    size = sum(path.stat().st_size for path in data.iterdir())
    assert len(told) == 60
    assert [read for read, _ in told] == sorted({read for read, _ in told})
    assert told[-1] == (size, size)
    open_corpus(section, 0, 3, None, tmp_path / "cache", lambda *_: pytest.fail("nothing is tokenized twice"))


def test_a_cache_that_cannot_be_written_is_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PierError, match="file") as caught:
        open_slot(data, tmp_path / "file" / "cache")
    assert "data directory" in caught.value.remedy


def test_data_without_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(PierError, match="no text in it") as caught:
        open_slot(tmp_path / "empty.txt", tmp_path / "cache")
    assert "--dataset PATH" in caught.value.remedy
    assert list((tmp_path / "cache").iterdir()) == []


def word_tokenizer(path: Path, words: int) -> str:
    vocabulary = {f"w{number}": number for number in range(words - 1)} | {"</s>": words - 1}
    library = Library(models.WordLevel(vocabulary, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(path))
    return str(path)


@pytest.mark.parametrize(("words", "kind"), [(256, np.uint8), (257, np.uint16), (65_537, np.uint32)])
def test_tokens_take_as_few_bytes_as_their_ids_need(tmp_path: Path, words: int, kind: type[np.unsignedinteger]) -> None:
    tokenizer = word_tokenizer(tmp_path / "tokenizer.json", words)
    (tmp_path / "a.txt").write_text(f"w1 w{words - 2}")
    corpus = open_slot(tmp_path / "a.txt", tmp_path / "cache", 0, 1, tokenizer=tokenizer, validation=1e-9)
    [tokens] = corpus.train.arrays
    assert tokens.dtype == kind
    assert tokens.tolist() == [1, words - 2, words - 1]
    assert corpus.vocab_size == words
    assert len(corpus.validation) == 0


def test_another_tokenizer_in_the_same_file_makes_another_cache(data: Path, tmp_path: Path) -> None:
    for words in (10, 11):
        tokenizer = word_tokenizer(tmp_path / "tokenizer.json", words)
        assert open_slot(data, tmp_path / "cache", tokenizer=tokenizer).vocab_size == words
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_short_file_reaches_every_slot(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {number}\n" for number in range(40_000)))
    assert path.stat().st_size < 1e6
    corpora = [open_slot(path, tmp_path / "cache", slot, 4, validation=0.05) for slot in range(4)]
    assert min(len(corpus.train) for corpus in corpora) > 20_000
    assert len(corpora[0].validation) > 4_000
    documents = len(list(open_source(DataSection(source="text", path=str(path))).documents()))
    separators = sum(text_of(corpus.train).count(b"\n\n") for corpus in corpora)
    assert 0.8 * documents < separators + text_of(corpora[0].validation).count(b"\n\n") <= documents


CONFIG = RunConfig.model_validate({"run": {"sites": 3}, "data": {"source": "text", "path": "/text", "validation": 0.1}})


def test_data_that_all_sites_have_is_dealt() -> None:
    assert SiteData.of(CONFIG, 1, None, shared=False) == SiteData(1, 3, None)
    assert SiteData.of(CONFIG, 5, "/copy", shared=True) == SiteData(2, 3, "/copy")


def test_a_site_trains_on_all_of_its_own_data(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number:03}.txt").write_text(f"text {number}\n")
    own = SiteData.of(CONFIG, 1, str(tmp_path), shared=False)
    corpus = open_corpus(CONFIG.data, own.slot, own.slots, own.path, tmp_path / "cache")
    trained, held_out = (text_of(part).count(b"text") for part in (corpus.train, corpus.validation))
    assert trained + held_out == 200
    assert held_out < 40


@pytest.mark.parametrize(
    ("dataset", "shared", "said"),
    [
        (None, False, "This site trains on part 2 of 3 of data.path = /text, which is the same at every site."),
        ("/own", False, "its own data, /own: all except the 10 % validation split. If every site has a copy"),
        ("/copy", True, "part 2 of 3 of /copy: a copy of the run's data"),
    ],
)
def test_what_it_trains_on_is_said(dataset: str | None, shared: bool, said: str) -> None:
    assert said in SiteData.of(CONFIG, 1, dataset, shared).describe(CONFIG)


def test_a_site_alone_has_all_of_the_built_in_text() -> None:
    config = RunConfig()
    said = "This site trains on all except the 2 % validation split of the built-in text"
    assert SiteData.of(config, 0, None, shared=False).describe(config).startswith(said)


def test_data_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(PierError, match="the data has no text in it"):
        check_data(CONFIG, str(tmp_path))


CONTEXT = 8


def corpus_of(train: Any, validation: Any) -> Corpus:
    return Corpus((Part(Stream([train]), Stream([validation])),), 20_000)


CORPUS = corpus_of(np.arange(5000, dtype=np.uint16), np.arange(10_000, 10_100, dtype=np.uint16))

steps = st.integers(0, 2**40)


def windows(seed: int = 1, node: str = "a", corpus: Corpus = CORPUS) -> Windows:
    return Windows(corpus, CONTEXT, seed, node)


def equal(one: Batch, other: Batch) -> bool:
    return all(np.array_equal(*pair) for pair in zip(one, other, strict=True))


@given(steps, st.integers(1, 40))
def test_targets_are_inputs_one_token_later(step: int, sequences: int) -> None:
    inputs, targets = windows().batch(step, sequences)
    assert inputs.shape == targets.shape == (sequences, CONTEXT)
    assert inputs.dtype == targets.dtype == np.int64
    assert (targets == inputs + 1).all(), "the corpus counts up"
    assert (np.diff(inputs) == 1).all()


@given(steps, st.integers(1, 40), st.integers(1, 8))
def test_workers_rows_join_to_the_batch(step: int, sequences: int, workers: int) -> None:
    parts = [windows().rows(step, *share(sequences, worker, workers)) for worker in range(workers)]
    joined = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    assert equal(joined, windows().batch(step, sequences))


@given(st.integers(0, 1000), st.integers(1, 64))
def test_shares_are_all_and_nearly_equal(sequences: int, workers: int) -> None:
    shares = [share(sequences, worker, workers) for worker in range(workers)]
    ends = [first + count for first, count in shares]
    assert [first for first, _ in shares] == [0, *ends[:-1]]
    assert ends[-1] == sequences
    assert max(count for _, count in shares) - min(count for _, count in shares) <= 1


@given(steps, st.integers(1, 20))
def test_a_larger_batch_only_adds_rows(step: int, sequences: int) -> None:
    small, large = windows().batch(step, sequences), windows().batch(step, sequences + 5)
    assert equal(small, (large[0][:sequences], large[1][:sequences]))


def test_seed_node_and_step_each_decide() -> None:
    batch = windows().batch(3, 4)
    assert equal(batch, windows().batch(3, 4))
    assert not equal(batch, windows().batch(4, 4))
    assert not equal(batch, windows(seed=2).batch(3, 4))
    assert not equal(batch, windows(node="b").batch(3, 4))


def test_the_draw_never_changes() -> None:
    inputs, _ = windows().batch(7, 4)
    assert inputs[:, 0].tolist() == [4433, 149, 4185, 3191]


def test_starts_are_spread_over_all_of_the_part() -> None:
    corpus = corpus_of(np.arange(CONTEXT + 10, dtype=np.uint8), np.arange(100))
    first = np.concatenate([windows(corpus=corpus).batch(step, 50)[0][:, 0] for step in range(40)])
    counts = np.bincount(first, minlength=10)
    assert len(counts) == 10
    assert counts.min() > 150
    assert counts.max() < 250


def test_validation_is_even_and_the_same_for_all() -> None:
    batches = windows().validation(3, 4)
    assert [batch[0].shape for batch in batches] == [(4, CONTEXT)] * 3
    starts = np.concatenate([inputs[:, 0] for inputs, _ in batches]) - 10_000
    assert starts.tolist() == [0, 8, 16, 24, 33, 41, 49, 57, 66, 74, 82, 91]
    assert all(equal(*pair) for pair in zip(batches, windows(9, "z").validation(3, 4), strict=True))
    assert all((targets == inputs + 1).all() for inputs, targets in batches)


@pytest.mark.parametrize("workers", [1, 2, 5, 13])
def test_validation_in_small_batches_and_by_several_workers_has_the_same_windows(workers: int) -> None:
    whole = [row for inputs, _ in windows().validation(3, 4) for row in inputs.tolist()]
    shares = [windows().validation(3, 4, 2, worker, workers) for worker in range(workers)]
    batches = [inputs for share in shares for inputs, _ in share]
    assert [row for batch in batches for row in batch.tolist()] == whole
    assert {len(batch) for batch in batches} <= {1, 2}


def test_a_corpus_of_one_window_is_enough() -> None:
    corpus = corpus_of(np.arange(CONTEXT + 1), np.arange(CONTEXT + 1))
    inputs, targets = windows(corpus=corpus).batch(5, 2)
    assert inputs.tolist() == [list(range(CONTEXT))] * 2
    assert targets.tolist() == [list(range(1, CONTEXT + 1))] * 2
    [(inputs, _)] = windows(corpus=corpus).validation(1, 1)
    assert inputs.tolist() == [list(range(CONTEXT))]


@pytest.mark.parametrize(
    ("train", "validation", "problem", "remedy"),
    [
        (CONTEXT, 100, r"this site's part .* has 8 tokens; one window of model\.context = 8 needs 9", "run.sites"),
        (0, 100, r"has 0 tokens", "Add text"),
        (100, CONTEXT, r"the validation part of the data has 8 tokens; .* needs 9", "data.validation"),
    ],
)
def test_too_little_text_says_what_to_do(train: int, validation: int, problem: str, remedy: str) -> None:
    with pytest.raises(PierError, match=problem) as caught:
        windows(corpus=corpus_of(np.zeros(train, np.uint8), np.zeros(validation, np.uint8)))
    assert remedy in caught.value.remedy
