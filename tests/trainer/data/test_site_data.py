"""Data that every site has is dealt; data of a site's own is all for that site; and which of both it is, is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig
from pier_node.trainer.data.corpus import open_corpus
from pier_node.trainer.data.site_data import SiteData, check_data

CONFIG = RunConfig.model_validate({"run": {"sites": 3}, "data": {"source": "text", "path": "/text", "validation": 0.1}})


def test_data_that_all_sites_have_is_dealt() -> None:
    assert SiteData.of(CONFIG, 1, None, shared=False) == SiteData(1, 3, None)
    assert SiteData.of(CONFIG, 5, "/copy", shared=True) == SiteData(2, 3, "/copy")


def test_a_site_trains_on_all_of_its_own_data(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number:03}.txt").write_text(f"text {number}\n")
    own = SiteData.of(CONFIG, 1, str(tmp_path), shared=False)
    corpus = open_corpus(CONFIG.data, own.slot, own.slots, own.path, tmp_path / "cache")
    trained, held_out = (bytes(part).count(b"text") for part in (corpus.train, corpus.validation))
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
