"""Every command of a tutorial is run, as its page shows it, by sites on this machine.

A `console` block belongs to a terminal, which its title names: a machine, and perhaps which terminal of it. There each
`$ command` is run in the folder of that machine, when the command before it has ended well, and prints what stands
below it. Files are written where a block's title says so, and servers get a Ctrl+C at the end. Instead of minutes of
training there are some steps of the smallest model, and addresses are free ones.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes.program import ENVIRONMENT
from processes.site import wait_until
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from bench.ports import free_port
from pier_node.config.run import RunConfig
from pier_node.trainer.model.export import export
from pier_node.trainer.model.initial import initial_weights

pytestmark = pytest.mark.processes

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
BLOCK = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
ALL = "both machines"
SMALLER = {"--steps 1000": "--preset llama-tiny --steps 100", "total_steps = 1000": "total_steps = 40"}
SMALLER |= {"total_steps = 200": "total_steps = 8"}
SMALLER |= {"inner_steps = 50": "inner_steps = 10", '"llama-1m"': '"llama-tiny"', "--steps 2000": "--steps 100"}
SMALLER |= {"steps = [150, 200, 250]": "steps = [40, 50, 60]"}
SERVERS = ("pier-coordinator start", "pier-node serve")
DOWNLOAD = re.compile(r"hf download .* --local-dir (\S+)")


@dataclass
class Command:
    """A command of a terminal, and the file with what it prints."""

    text: str
    process: subprocess.Popen[bytes]
    log: Path

    def __str__(self) -> str:
        return f"$ {self.text}\n{self.log.read_text(errors='replace')[-4000:]}"

    def printed(self, line: str) -> bool:
        """Whether it has printed this."""
        return line in " ".join(self.log.read_text(errors="replace").split())

    def prints(self, line: str) -> None:
        """Wait until it has."""
        wait_until(f"{line!r} of {self}", lambda: self.process.poll() is not None or self.printed(line))
        assert self.printed(line), f"{line!r} is not in {self}"

    @property
    def serves(self) -> bool:
        """Whether it runs until Ctrl+C."""
        return self.text.startswith(SERVERS)

    def interrupt(self) -> None:
        """Press Ctrl+C."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    def ends(self) -> None:
        """Wait until it has ended, well."""
        wait_until(f"the end of {self}", lambda: self.process.poll() is not None)
        assert self.process.returncode == 0, str(self)


class Tutorial:
    """A page, and the machines on which its commands run.

    Args:
        page: its text.
        folder: takes the machines' folders.
    """

    def __init__(self, page: str, folder: Path) -> None:
        self._page, self._folder = page, folder
        titles = [title for _, title, _ in BLOCK.findall(page)]
        machines = [re.split("[,:]", title)[0] for title in titles]
        self._ports = {machine: free_port() for machine in dict.fromkeys(machines) if machine != ALL}
        self._first = next(iter(self._ports))
        self._services = {place: free_port() for place in ("7720", "7780", "7790")}
        self._terminals: dict[str, Command] = {}
        self.commands: list[Command] = []
        for machine in self._ports:
            self.folder(machine).mkdir()

    def folder(self, machine: str) -> Path:
        """Where its commands run."""
        return self._folder / machine.replace(" ", "-")

    def run(self) -> None:
        """Do what the page says, and wait until the last commands have ended."""
        for kind, title, text in BLOCK.findall(self._page):
            if kind == "console":
                self._type(title, text)
                continue
            self._wait_for(title)
            who, _, file = title.partition(": ")
            for machine in self._ports if who == ALL else (who,):
                (self.folder(machine) / file).write_text(self._here(text, machine))
        for command in self.commands:
            if command.serves:
                command.interrupt()
        for command in self.commands:
            command.ends()

    def stop(self) -> None:
        """Kill what still runs."""
        for command in self.commands:
            with suppress(ProcessLookupError):
                os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait()

    def _type(self, terminal: str, text: str) -> None:
        for line in text.splitlines():
            if line.startswith("$ "):
                if before := self._terminals.get(terminal):
                    before.ends()
                self._terminals[terminal] = self._launch(line[2:], terminal.partition(",")[0])
            else:
                self._terminals[terminal].prints(self._here(line, self._first))

    def _launch(self, text: str, machine: str) -> Command:
        self._wait_for(text)
        log = self._folder / f"{len(self.commands)}.log"
        text = self._here(text, machine)
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", text],
                cwd=self.folder(machine),
                env={
                    **ENVIRONMENT,
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "HOME": str(self._folder),
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.commands.append(Command(text, process, log))
        return self.commands[-1]

    def _wait_for(self, text: str) -> None:
        """Wait as a person would: until other terminals are quiet or train, and a file to be copied is there."""
        for command in self.commands:
            if "pier-node start" not in command.text and not command.serves:
                command.ends()
        if copied := re.match(r"scp (?:-r )?([\w-]+):(\S+)", text):
            wait_until(text, (self.folder(copied[1]) / copied[2]).exists)

    def _here(self, text: str, machine: str) -> str:
        for shown, meant in SMALLER.items():
            text = text.replace(shown, meant)
        text = text.replace("203.0.113.7:7700", f"127.0.0.1:{self._ports[self._first]}")
        service = {place: f"127.0.0.1:{port}" for place, port in self._services.items()}
        for shown, meant in service.items():
            text = re.sub(rf"(203\.0\.113\.7|127\.0\.0\.1):{shown}", meant, text)
        reached = f"--listen {service['7790']} --advertise {service['7790']} --page {service['7780']}"
        text = text.replace("pier-coordinator start", f"pier-coordinator start {reached}")
        text = text.replace("pier-node serve", f"pier-node serve --listen {service['7720']}")
        text = re.sub(r"^scp( -r)? ([\w-]+):", r"cp\1 ../\2/", text)
        text = DOWNLOAD.sub(r"cp -r ~/pretrained \1", text)
        return text.replace("pier-node start", f"pier-node start --listen 127.0.0.1:{self._ports[machine]}")


def small_files() -> list[Path]:
    """Enough for a few to be held out for validation, whatever their hashes are."""
    paths = sorted(Path(argparse.__file__).parent.glob("[a-z]*/*.py"))
    return [path for path in paths if 500 < path.stat().st_size < 20_000 and path.is_file()][:600]


def pretrained(folder: Path) -> None:
    """A model as one would download it, of the smallest size, whose tokens are bytes."""
    config = RunConfig.model_validate({"model": {"preset": "llama-tiny"}}).model
    export(config, initial_weights(config, seed=1), folder)
    tokenizer = Tokenizer(BPE({letter: id for id, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def tutorial(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tutorial]:
    (tmp_path / "my-text").mkdir()
    for number, path in enumerate(small_files()):
        shutil.copy(path, tmp_path / "my-text" / f"{number}.txt")
    pretrained(tmp_path / "pretrained")
    made = Tutorial((FOLDER / f"{request.param}.md").read_text(), tmp_path)
    yield made
    made.stop()


@pytest.mark.parametrize("tutorial", sorted(path.stem for path in FOLDER.glob("*.md")), indirect=True)
def test_every_command_of_a_tutorial_works(tutorial: Tutorial) -> None:
    tutorial.run()
    assert [str(command) for command in tutorial.commands if command.printed("Traceback")] == []
