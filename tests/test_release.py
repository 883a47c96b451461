"""What is released: the packages, outside of the repository, and the files that say how it is checked and made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from pier_node import __version__

ROOT = Path(__file__).parents[1]
PACKAGES = ("node", "coordinator", "protos")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def sources() -> set[str]:
    """The tracked files of the packages, as they lie in a wheel."""
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    return {line.partition("/")[2] for line in listed.stdout.splitlines()}


def inside(archive: Path) -> set[str]:
    """The files in a wheel or an sdist, without the folder that an sdist begins with."""
    if archive.suffix == ".whl":
        return set(zipfile.ZipFile(archive).namelist())
    with tarfile.open(archive) as sdist:
        return {name.partition("/")[2] for name in sdist.getnames()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both packages, as scripts/package makes them."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    made = subprocess.run(build, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout[-3000:] + made.stderr[-3000:]
    return folder


@pytest.mark.processes
def test_a_wheel_works_outside_of_the_repository(dist: Path, tmp_path: Path) -> None:
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    assert sources() - inside(wheel) == set()
    assert {"LICENSE", "README.md", "pyproject.toml"} - inside(sdist) == set()

    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel], check=True)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # without Pier: .pth are not followed

    def run(*command: str | Path) -> str:
        plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, check=True).stdout

    where = run(
        python, "-c", "import pier, pier_coordinator, pier_proto.v1.peer_pb2 as p; print(pier.__file__, p.__file__)"
    )
    assert [Path(path).is_relative_to(site) for path in where.split()] == [True, True]
    assert __version__ in run(tmp_path / "venv/bin/pier-node", "--version")
    assert "Wrote run.toml" in run(tmp_path / "venv/bin/pier-node", "init")
    assert "invite" in run(tmp_path / "venv/bin/pier-coordinator", "--help")


def test_the_version_is_one() -> None:
    assert PROJECT["version"] == __version__
    check = [str(ROOT / "scripts/package"), "--is-version"]
    assert subprocess.run([*check, f"v{__version__}"]).returncode == 0
    wrong = subprocess.run([*check, "v9.9.9"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert __version__ in wrong.stderr


def test_an_unconstrained_install_takes_no_next_major_version() -> None:
    assert [need for need in PROJECT["dependencies"] if "<" not in need] == []


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_call_scripts_that_people_can_call(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job.get("steps", []) if "run" in step]
    programs = {command.split()[0] for command in commands} - {"gh"}
    assert programs
    assert [program for program in programs if not os.access(ROOT / program, os.X_OK)] == []
    assert {job["needs"] for job in jobs.values() if "needs" in job} <= set(jobs)


def test_the_hooks_of_pre_commit_fetch_nothing() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    assert all(hook["entry"].startswith(".venv/bin/ruff ") for hook in local["hooks"])


def test_what_people_read_first_links_to_files_that_are_there() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text())
        assert [link for link in links if not (ROOT / link).exists()] == [], page
