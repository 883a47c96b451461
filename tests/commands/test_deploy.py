"""The templates in deploy/: that Pier's own parser takes their commands, and that their parts fit together.

The schemas of Kubernetes and of GitHub's workflows are large. The tests that need them are skipped, loudly, where their
packages are not installed: `pip install kubernetes-validate check-jsonschema`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import click
import pytest

from pier_coordinator.cli import main as coordinator
from pier_node.cli import main as node

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PATIENCE = 60.0
FAKE = """#!/bin/bash
printf '%s\\n' "$0 $*" >>"$RECORD"
case "${0##*/} $1" in
    "scontrol show") printf 'n1\\nn2\\n' ;;
    "pier-node start")
        [ "$SLURM_JOB_NUM_NODES" = 1 ] || until grep -q /srun "$RECORD"; do sleep 0.05; done
        [ -z "$HANG" ] || while [ ! -e "$HANG" ]; do sleep 0.05; done ;;
    "pier-node stop") touch "$HANG" ;;
esac
"""


def parsed(words: Sequence[str], program: click.Group = node) -> dict[str, Any]:
    """The options of a command as Pier's parser understands them; it raises what it does not know."""
    command = program.commands[words[0]]
    return command.make_context(words[0], list(words[1:])).params


def read_unit() -> ConfigParser:
    unit = ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "pier-node.service")
    return unit


def test_the_unit_starts_a_site_by_a_command_that_exists() -> None:
    service = read_unit()["Service"]
    program, *words = shlex.split(service["ExecStart"])
    options = re.search(r"PIER_OPTIONS=(.*)' >", (DEPLOY / "pier-node.service").read_text())
    assert options is not None
    assert words.pop() == "$PIER_OPTIONS"
    found = parsed([*words, *options[1].split()])
    assert (Path(program).name, found["coordinator"], found["name"]) == ("pier-node", "lab.example.org:7790", "lab-b")
    assert found["folder"].is_relative_to(Path("/var/lib") / service["StateDirectory"])
    assert found["token_file"] == Path("%d/token")
    assert service["LoadCredential"].startswith("token:")
    assert service["Restart"] == "on-failure"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / "pier-node.service"
    copy.write_text((DEPLOY / "pier-node.service").read_text().replace("/opt/pier/bin/pier-node", "/bin/true"))
    words = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    about_it = [line for line in done.stderr.splitlines() if copy.name in line]
    assert (done.returncode, about_it) == (0, [])


def test_kubernetes_starts_sites_by_a_command_that_exists() -> None:
    yaml: Any = pytest.importorskip("yaml")
    service, sites = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = sites["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["pier-node"]' in dockerfile
    variables = {each["name"]: each.get("value", "x") for each in container["env"]}
    words = [re.sub(r"\$\((\w+)\)", lambda it: variables[it[1]], word) for word in container["args"]]
    found = parsed(words)
    assert (found["coordinator"], found["advertise"]) == ("pier.example.org:7790", "x.pier.x.svc.cluster.local:7700")
    assert variables.keys() >= {"PIER_TOKEN"}  # not in the arguments, which everybody sees
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        (program,) = container[probe]["exec"]["command"]
        assert f"docker/{program}" in dockerfile
    labels = pod["metadata"]["labels"]
    assert labels == sites["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert sites["spec"]["serviceName"] == service["metadata"]["name"]
    volumes = {each["name"] for each in pod["spec"]["volumes"]}
    claims = {each["metadata"]["name"] for each in sites["spec"]["volumeClaimTemplates"]}
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert set(mounted) == volumes | claims
    assert mounted["data"] == "/pier/pier-data"  # the image's folder and the default of --data
    assert pod["spec"]["securityContext"]["runAsUser"] == 1000  # the image's
    command = re.search(r"pier-coordinator (invite.*?30d)", (DEPLOY / "kubernetes.yaml").read_text())
    assert command is not None
    assert parsed(command[1].split(), coordinator)["uses"] == sites["spec"]["replicas"]


def test_the_manifest_is_as_kubernetes_wants_it() -> None:
    yaml: Any = pytest.importorskip("yaml")
    schemas: Any = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate here: NOT validated")
    for resource in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()):
        assert schemas.validate(resource, schemas.latest_version(), strict=True)


def test_the_workflows_are_as_github_wants_them() -> None:
    pytest.importorskip("check_jsonschema", reason="no check-jsonschema here: the workflows are NOT validated")
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, files)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert files
    assert done.returncode == 0, done.stdout


def test_what_workflows_and_templates_call_is_there() -> None:
    texts = [path.read_text() for path in (ROOT / ".github").rglob("*.yml")]
    called = {it for text in texts for it in re.findall(r"run: ((?:scripts|\.ci)/\S+)", text)}
    assert called >= {".ci/run", "scripts/docs", "scripts/images", "scripts/install-cpu", "scripts/package"}
    for script in [ROOT / name for name in called] + [DEPLOY / "site.sbatch"]:
        assert subprocess.run(["bash", "-n", script], timeout=PATIENCE, check=False).returncode == 0, script


class Job:
    """The Slurm script, with stand-ins for all programs that it calls."""

    def __init__(self, folder: Path, **given: str) -> None:
        (folder / "bin").mkdir()
        self.record, self.hang = folder / "record", folder / "stopped"
        for name in ("scontrol", "srun", "pier-node"):
            (folder / "bin" / name).write_text(FAKE)
            (folder / "bin" / name).chmod(0o755)
        told = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7", "HANG": "", **given}
        told |= {"RECORD": str(self.record), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SITE": "site"}
        self.process = subprocess.Popen(
            ["bash", DEPLOY / "site.sbatch"], cwd=folder, env=told, stderr=subprocess.PIPE, text=True
        )

    def calls(self, program: str) -> list[str]:
        """The arguments of each call of a program."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return [line.split(f"/{program} ", 1)[1] for line in lines if f"/{program} " in line]

    def end(self) -> int:
        _, error = self.process.communicate(timeout=PATIENCE)
        assert "unbound" not in error
        return self.process.returncode


def test_a_job_on_one_node_is_a_site(tmp_path: Path) -> None:
    (tmp_path / "site.token").touch()
    job = Job(tmp_path, JOIN="--coordinator lab.example.org:7790 --name cluster")
    assert job.end() == 0
    (call,) = job.calls("pier-node")
    found = parsed(shlex.split(call))
    assert (found["folder"], found["token_file"]) == (Path("site"), Path("site.token"))
    assert (found["coordinator"], found["name"], found["command"]) == ("lab.example.org:7790", "cluster", "")
    assert job.calls("srun") == []


def test_a_job_on_two_nodes_runs_the_program_on_both(tmp_path: Path) -> None:
    job = Job(tmp_path, SLURM_JOB_NUM_NODES="2", SLURM_GPUS_ON_NODE="8", TRAIN="train.py --long", JOIN="--run run.toml")
    assert job.end() == 0
    (call,), ((other),) = job.calls("pier-node"), job.calls("srun")
    begin, _, command = call.partition(" --exec ")
    common = "torchrun --nnodes 2 --nproc-per-node 8 --master-addr n1 --master-port 29500 --node-rank"
    assert command == f"{common} 0 train.py --long --run run.toml"
    assert parsed(shlex.split(begin))["folder"] == Path("site")
    assert "--nodes 1 --ntasks-per-node 1 --exclude n1" in other
    assert f"{common} $((SLURM_NODEID + 1)) train.py --long" in other


def test_without_a_program_two_nodes_are_refused(tmp_path: Path) -> None:
    assert Job(tmp_path, SLURM_JOB_NUM_NODES="2").end() == 2


def test_before_its_time_is_up_a_site_leaves_and_its_job_is_queued_again(tmp_path: Path) -> None:
    job = Job(tmp_path, HANG=str(tmp_path / "stopped"))
    give_up = time.monotonic() + PATIENCE
    while not job.calls("pier-node"):
        assert time.monotonic() < give_up
        time.sleep(0.05)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 0
    stop = job.calls("pier-node")[1]
    assert parsed(shlex.split(stop))["folder"] == Path("site")
    assert job.calls("scontrol")[1:] == ["requeue 7"]
