from __future__ import annotations

from pathlib import Path

import pytest

from pier_node.base.errors import PierError
from pier_node.demo.runner import MARK, claimed


def test_a_new_folder_is_made_and_marked(tmp_path: Path) -> None:
    with claimed(tmp_path / "a" / "demo") as work:
        assert work == tmp_path / "a" / "demo"
        assert [path.name for path in work.iterdir()] == [MARK]
        assert work.stat().st_mode & 0o077 == 0  # it will hold keys and a token


def test_the_last_demo_goes_unless_it_is_kept(tmp_path: Path) -> None:
    with claimed(tmp_path, keep=False) as work:
        (work / "alpha" / "deep").mkdir(parents=True)
        (work / "alpha.log").write_text("old")
    with claimed(tmp_path, keep=True) as work:
        assert (work / "alpha.log").exists()
    with claimed(tmp_path, keep=False) as work:
        assert [path.name for path in work.iterdir()] == [MARK]


def test_what_a_link_points_to_stays(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("years of work")
    with claimed(tmp_path / "demo", keep=False) as work:
        (work / "link").symlink_to(precious)
    with claimed(tmp_path / "demo", keep=False) as work:
        assert not (work / "link").is_symlink()
    assert (precious / "thesis").exists()


@pytest.mark.parametrize("keep", [False, True])
def test_other_folders_are_not_touched(tmp_path: Path, keep: bool) -> None:
    (tmp_path / "thesis").write_text("years of work")
    with pytest.raises(PierError, match="holds something else than a demo"), claimed(tmp_path, keep):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


def test_one_demo_at_a_time(tmp_path: Path) -> None:
    with claimed(tmp_path, keep=False) as work:
        (work / "alpha.log").write_text("now")
        with pytest.raises(PierError, match="another demo is at work"), claimed(tmp_path, keep=False):
            pass
        assert (work / "alpha.log").exists()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PierError, match="cannot work there"), claimed(tmp_path / "file", keep=False):
        pass


def test_errors_of_the_demo_are_its_own(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), claimed(tmp_path, keep=False) as work:
        (work / "missing").read_text()
