"""The program's end of the engine: one rank, whose daemon is played by the test."""

from __future__ import annotations

import gc
import logging
import math
import os
import resource
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector
from pier_node.engine import client
from pier_node.engine.client import DaemonConnection, Site, State, StopTraining
from pier_node.engine.join import OwnState, join
from pier_node.engine.machines import Ranks
from pier_node.engine.messages import (
    Attached,
    Done,
    Enough,
    Evaluate,
    Evaluated,
    Left,
    Logged,
    Message,
    Over,
    Progress,
    Publishing,
    Ready,
    Train,
    decode,
    encode,
)
from pier_node.engine.parameters import Vectors
from pier_node.engine.ranks import COLUMNS
from pier_node.engine.training_process import ENGINE_VARIABLE


class Scene:
    """A model of two weights, its optimizer, and the daemon's end of the conversation."""

    def __init__(self, folder: Path) -> None:
        self.model = nn.Linear(2, 1, bias=False)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.others = list[torch.optim.Optimizer]()
        self.outbox, self.anchor, self.table = SharedVector(2), SharedVector(2), SharedVector(COLUMNS)
        self.folder, self.logged = folder, list[tuple[int, dict[str, float | str]]]()
        self.evaluate: Callable[[], float] | None = None
        self._ours, self._theirs = socket.socketpair()
        self._ours.settimeout(60)
        self._lines = self._ours.makefile("rb")

    def say(self, *messages: Message) -> None:
        self._ours.sendall(b"".join(map(encode, messages)))

    def hear(self) -> Message:
        return decode(self._lines.readline())

    def heard(self) -> Iterator[Message]:
        """What the program has said before it left the connection."""
        return map(decode, iter(self._lines.readline, b""))

    def train(self, steps: int, first: int = 0, forget: bool = False) -> Train:
        return Train(first + 1, first, steps, self.anchor.path, forget, round=0, sites=1, losses={})

    def joined(self, *first: Message, publish: bool = True) -> Site:
        """The site, which has heard what to do first."""
        self.say(Attached(self.outbox.path, self.table.path, 0, 1, 100, str(self.folder), 0, publish), *first)
        link, optimizers = DaemonConnection(self._theirs, Ranks()), [*self.others, self.optimizer]
        site = Site(OwnState(Vectors(self.model, 0), optimizers, link, self.evaluate), link, 8, optimizers)
        assert isinstance(self.hear(), Ready)
        return site

    def step(self, site: Site, loss: float | None = None) -> None:
        self.model.weight.grad = torch.ones(1, 2)
        self.optimizer.step()
        site.step(loss=loss)

    def steps(self, site: Site, losses: Sequence[float | None], then: Message) -> None:
        """Steps to the end of the round, and what follows it."""
        for loss in losses[:-1]:
            self.step(site, loss)
        self.say(then)
        self.step(site, losses[-1])

    def done(self) -> Done:
        """What the program says at the end of its steps; what it says before is left out."""
        while not isinstance(said := self.hear(), Done):
            assert isinstance(said, Progress | Publishing | Logged)
            if isinstance(said, Logged):
                self.logged.append((said.step, said.metrics))
        return said

    @contextmanager
    def renumbered(self, number: int) -> Iterator[None]:
        """Meanwhile the program's end of the connection is this file descriptor."""
        own = self._theirs
        with socket.socket(fileno=os.dup2(own.fileno(), number)) as self._theirs:
            yield
        self._theirs = own

    @contextmanager
    def listening(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Meanwhile pier.join finds the daemon, which has a round of inner steps for it."""
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path := str(self.folder / "socket"))
            server.listen()
            monkeypatch.setenv(ENGINE_VARIABLE, path)
            monkeypatch.setattr("pier_node.engine.join.end_with", lambda _: None)
            thread = Thread(target=self._accept, args=(server,))
            thread.start()
            yield
            thread.join()

    def _accept(self, server: socket.socket) -> None:
        with server.accept()[0] as stream:
            place = Attached(self.outbox.path, self.table.path, 0, 1, 100, str(self.folder), 0, publish=True)
            stream.sendall(encode(place) + encode(self.train(50)))
            while stream.recv(1 << 16):
                pass

    def end(self) -> None:
        self._lines.close()
        self._ours.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    torch.manual_seed(0)
    scene = Scene(tmp_path)
    yield scene
    scene.end()


def test_steps_begin_with_the_weights_of_the_daemon_and_end_in_the_outbox(scene: Scene) -> None:
    scene.anchor.array[:] = 3.0, 4.0
    site = scene.joined(scene.train(2))
    assert scene.model.weight.tolist() == [[3.0, 4.0]]
    with pytest.raises(StopTraining):
        scene.steps(site, [2.0, 1.0], then=Over(""))
    done = scene.done()
    assert (done.tokens, done.adam_step, done.diverged) == (16, 0, False)
    assert scene.outbox.array.tolist() == scene.model.weight.flatten().tolist()


class Three(Ranks):
    """Three ranks that do the same, of which this is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 3

    def share(self, line: bytes) -> bytes:
        return line

    def sums(self, *numbers: float) -> list[float]:
        return [3 * number for number in numbers]

    def meet(self) -> None:
        pass


def test_all_tokens_of_a_step_count_whatever_the_number_of_ranks(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.Ranks", Three)
    scene.table = SharedVector(3 * COLUMNS)
    site = scene.joined(scene.train(2))
    with pytest.raises(StopTraining):
        scene.steps(site, [2.0, 1.0], then=Over(""))
    assert scene.done().tokens == 16


def test_what_is_in_the_outbox_stays_there_unless_the_daemon_wants_the_weights(scene: Scene) -> None:
    scene.outbox.array[:] = 3.0, 4.0
    scene.joined(scene.train(2), publish=False)
    assert scene.outbox.array.tolist() == [3.0, 4.0]


def test_a_result_that_is_there_before_the_first_step_is_heard(scene: Scene) -> None:
    """All of it may have arrived at once."""
    site = scene.joined(scene.train(5), Enough(1))
    scene.steps(site, [1.0], then=scene.train(5, first=1))
    assert scene.done().steps == 1


def test_most_losses_that_are_not_finite_are_told_with_the_step(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    site = scene.joined(scene.train(5, first=20))
    with caplog.at_level(logging.WARNING):
        scene.steps(site, [2.0, 2.0, math.nan, math.inf, math.nan], then=scene.train(5, first=25))
    assert scene.done().diverged
    assert "the loss is not finite since about inner step 22" in caplog.text


def test_a_few_losses_that_are_not_finite_are_no_harm(scene: Scene) -> None:
    site = scene.joined(scene.train(4))
    scene.steps(site, [2.0, math.nan, 2.0, 2.0], then=scene.train(4, first=4))
    assert not scene.done().diverged


def test_a_loop_that_tells_no_losses_has_not_diverged(scene: Scene) -> None:
    site = scene.joined(scene.train(2))
    scene.steps(site, [None, None], then=scene.train(2, first=2))
    assert not scene.done().diverged


def test_the_program_validates_the_weights_that_the_daemon_names_and_goes_on_with_its_own(scene: Scene) -> None:
    scene.evaluate = lambda: scene.model.weight.sum().item()
    best = SharedVector(2)
    best.array[:] = 5.0, 6.0
    scene.anchor.array[:] = 3.0, 4.0
    site = scene.joined(Evaluate(7, best.path), scene.train(2))
    assert scene.hear() == Evaluated(7, 11.0)
    assert scene.model.weight.tolist() == [[3.0, 4.0]]
    scene.step(site)
    scene.say(Evaluate(8, best.path), scene.train(2, first=2))
    scene.step(site)
    scene.done()
    assert scene.hear() == Evaluated(8, 11.0)
    assert scene.model.weight.tolist() == [[3.0, 4.0]]


def test_a_program_that_does_not_validate_is_not_asked_to(scene: Scene) -> None:
    with pytest.raises(PierError, match="Evaluate where inner steps were to come"):
        scene.joined(Evaluate(7, scene.anchor.path))


def test_a_step_says_what_it_came_to(scene: Scene) -> None:
    site = scene.joined(scene.train(2))
    site.step(tokens=torch.tensor(3), loss=torch.tensor(2.0), gradient_norm=torch.tensor(0.5))
    progress = scene.hear()
    assert isinstance(progress, Progress)
    assert (progress.step, progress.loss, progress.tokens, progress.gradient_norm) == (0, 2.0, 3, 0.5)


def test_a_number_of_tokens_that_is_none_is_refused(scene: Scene) -> None:
    site = scene.joined(scene.train(2))
    for wrong in (math.nan, math.inf, -1):
        with pytest.raises(PierError, match=f"tokens={float(wrong)}"):
            site.step(tokens=wrong)
    assert site.step_index == 0


def test_tokens_beyond_those_of_a_step_are_warned_of_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    site = scene.joined(scene.train(1), scene.train(1, first=1), scene.train(1, first=2))
    with caplog.at_level(logging.WARNING):
        site.step(tokens=8)
        assert "do not count" not in caplog.text
        site.step(tokens=9)
        scene.say(scene.train(1, first=3))
        site.step(tokens=9)
    assert caplog.text.count("a step had 9 tokens here, and step_tokens is 8") == 1


def test_steps_end_early_when_the_daemon_says_that_it_is_enough(scene: Scene) -> None:
    site = scene.joined(scene.train(1_000))
    scene.say(Enough(1), scene.train(2, first=1))
    scene.step(site)
    done = scene.done()
    assert (done.job, done.steps, done.tokens) == (1, 1, 8)
    assert scene.outbox.array.any()
    assert site.step_index == 1
    scene.say(Enough(1))  # too late: that was for steps that are done
    scene.steps(site, [None, None], then=scene.train(2, first=3))
    assert scene.done().steps == 2
    assert site.step_index == 3


def test_in_a_short_round_ranks_look_eight_times(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)  # its steps take no time
    looks, look = list[int](), DaemonConnection.look
    site = scene.joined(scene.train(80))

    def noted(link: DaemonConnection, again: int) -> tuple[bool, int]:
        looks.append(site.step_index)
        return look(link, again)

    monkeypatch.setattr(DaemonConnection, "look", noted)
    scene.steps(site, [None] * 80, then=scene.train(80, first=80))
    assert looks == [1, 11, 21, 31, 41, 51, 61, 71]


def test_weights_that_no_site_would_get_end_the_round_with_an_error(scene: Scene) -> None:
    site = scene.joined(scene.train(1))
    scene.model.weight = nn.Parameter(torch.zeros(1, 2))
    with pytest.raises(PierError, match="another parameter weight than at"):
        scene.step(site)


def test_an_optimizer_that_is_to_forget_begins_without_a_state(scene: Scene) -> None:
    site = scene.joined(scene.train(2))
    scene.steps(site, [None, None], then=scene.train(2, first=2, forget=True))
    assert not scene.optimizer.state
    scene.step(site)
    (state,) = scene.optimizer.state.values()
    assert state["step"] == 1


def test_an_optimizer_that_has_other_groups_finds_the_state_of_each_parameter(scene: Scene) -> None:
    scene.model.register_parameter("bias", nn.Parameter(torch.zeros(1)))
    scene.optimizer.add_param_group({"params": [scene.model.bias]})
    scene.outbox, scene.anchor = SharedVector(3), SharedVector(3)
    site = scene.joined(scene.train(50))
    scene.model.bias.grad = torch.full((1,), 5.0)
    scene.step(site)
    before = [scene.optimizer.state[it]["exp_avg"].tolist() for it in scene.model.parameters()]
    site.close()
    again = Scene(scene.folder)
    again.model, again.outbox, again.anchor = scene.model, scene.outbox, scene.anchor
    again.optimizer = torch.optim.AdamW([{"params": [scene.model.bias]}])
    again.optimizer.add_param_group({"params": [scene.model.weight], "weight_decay": 0.0})
    again.joined(again.train(50))
    assert [again.optimizer.state[it]["exp_avg"].tolist() for it in scene.model.parameters()] == before
    again.end()


def two_optimizers(model: nn.Module, swapped: bool) -> list[torch.optim.Optimizer]:
    """As people have one for matrices and another one for the rest."""
    model.register_parameter("bias", nn.Parameter(torch.zeros(1)))
    matrices = torch.optim.SGD([model.get_parameter("weight")], lr=0.1, momentum=0.9)
    rest = torch.optim.AdamW([model.get_parameter("bias")], lr=0.1)
    return [rest, matrices] if swapped else [matrices, rest]


@pytest.mark.parametrize("swapped", [False, True])
def test_each_of_several_optimizers_finds_its_state_by_its_kind_and_the_names_of_parameters(
    scene: Scene, swapped: bool
) -> None:
    scene.others = [*two_optimizers(scene.model, swapped=False)]
    scene.optimizer = scene.others.pop()
    scene.outbox, scene.anchor = SharedVector(3), SharedVector(3)
    site = scene.joined(scene.train(50))
    for parameter in scene.model.parameters():
        parameter.grad = torch.full_like(parameter, 5.0)
    scene.others[0].step()
    scene.step(site)
    site.close()
    again = Scene(scene.folder)
    again.outbox, again.anchor = scene.outbox, scene.anchor
    again.others = [*two_optimizers(again.model, swapped)]
    again.optimizer = again.others.pop()
    again.joined(again.train(50))
    optimizers = {type(each).__name__: each for each in (again.optimizer, *again.others)}
    assert optimizers["SGD"].state[again.model.weight]["momentum_buffer"].tolist() == [[5.0, 5.0]]
    assert optimizers["AdamW"].state[again.model.bias]["step"] == 1
    again.end()


def test_of_several_optimizers_the_steps_of_the_last_one_are_counted(scene: Scene) -> None:
    scene.others = [torch.optim.SGD(scene.model.parameters(), lr=0.0)]
    site = scene.joined(scene.train(2))
    with site:
        scene.model.weight.grad = torch.ones(1, 2)
        for _ in range(3):
            scene.others[0].step()
        scene.optimizer.step()
        assert site.step_index == 1
        scene.say(Over(""))
        scene.optimizer.step()
        pytest.fail("the run is over")
    assert site.step_index == 2


def test_a_full_disk_keeps_no_optimizer_state_and_ends_nothing(
    scene: Scene, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "optimizer-0-of-1.part").symlink_to("/dev/full")
    site = scene.joined(scene.train(2))
    with pytest.raises(StopTraining):
        scene.steps(site, [2.0, 1.0], then=Over(""))
    assert "is not kept" in caplog.text
    assert "No space left on device" in caplog.text


def test_a_process_that_the_program_forks_does_not_end_its_place(scene: Scene) -> None:
    site = scene.joined(scene.train(2))
    if (child := os.fork()) == 0:
        site.close()  # as `with` or the end of the interpreter does there
        os._exit(0)
    os.waitpid(child, 0)
    scene.steps(site, [2.0, 1.0], then=scene.train(2, 2))
    assert scene.done().steps == 2


def test_steps_that_with_counts_are_not_counted_again(scene: Scene) -> None:
    with pytest.raises(PierError, match="count each of them twice"), scene.joined(scene.train(5)) as site:
        scene.step(site)
    assert site.step_index == 1


def test_a_site_that_is_closed_takes_no_more_steps_and_says_so(scene: Scene) -> None:
    site = scene.joined(scene.train(1_000))
    site.close()
    with pytest.raises(PierError, match="it was closed"):
        scene.step(site)


def test_a_site_that_is_closed_keeps_no_model_in_memory(scene: Scene) -> None:
    """A notebook may join many runs, one after the other."""
    site = scene.joined(scene.train(1_000))
    site.close()
    last = weakref.ref(site)
    del site
    gc.collect()
    assert last() is None


def test_a_site_that_is_closed_early_keeps_its_optimizer(scene: Scene, tmp_path: Path) -> None:
    site = scene.joined(scene.train(1_000))
    scene.step(site)
    site.close()
    kept = torch.load(tmp_path / "optimizer-0-of-1.pt", weights_only=True)
    assert kept[0]["state"]["state"][0]["step"] == 1


ENDS: list[tuple[BaseException | None, bool, bool]] = [
    (None, True, True),
    (SystemExit(0), True, True),
    (SystemExit(3), False, False),
    (KeyboardInterrupt(), True, False),
    (RuntimeError("mine"), False, False),
]


@pytest.mark.parametrize(("error", "by_itself", "keeps"), ENDS)
def test_a_loop_that_ends_early_on_purpose_says_so(
    scene: Scene, tmp_path: Path, error: BaseException | None, by_itself: bool, keeps: bool
) -> None:
    with suppress(type(error) if error else StopTraining), scene.joined(scene.train(1_000)):
        scene.optimizer.step()
        if error:
            raise error
    said = [*scene.heard()]
    assert (Left(1) in said) is by_itself
    assert (tmp_path / "optimizer-0-of-1.pt").exists() is keeps


@pytest.mark.parametrize(("error", "by_itself"), [(None, True), (RuntimeError("mine"), False)])
def test_a_program_that_ends_without_closing_its_site_closes_it_unless_an_error_ends_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: Exception | None, by_itself: bool
) -> None:
    ends = list[Callable[[], None]]()
    monkeypatch.setattr("atexit.register", ends.append)
    scene.step(scene.joined(scene.train(1_000)))
    if error:
        monkeypatch.setattr("sys.last_value", error, raising=False)
    ends[-1]()
    assert (Left(1) in scene.heard()) is by_itself


def test_a_step_after_the_run_does_not_change_its_result(scene: Scene) -> None:
    """A program that is started again hears at once that the run is over, and may step before it asks."""
    result = SharedVector(2)
    result.array[:] = 5.0, 6.0
    site = scene.joined(Over(result.path))
    assert isinstance(scene.hear(), Ready)
    scene.end()
    del result
    with pytest.raises(StopTraining, match="the run is over"):
        scene.step(site)
    assert scene.model.weight.tolist() == [[5.0, 6.0]]


def test_a_site_whose_run_is_over_does_not_leave_it(scene: Scene) -> None:
    scene.joined(Over("")).close()
    assert [*scene.heard()] == [Ready()]


def test_a_loop_that_an_interrupt_ends_within_a_round_cannot_go_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook, where the cell is then run again: its weights may be half those of the round before."""
    site = scene.joined(scene.train(2))
    scene.step(site)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DaemonConnection, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scene.step(site)
    scene.say(scene.train(2, first=2))
    with pytest.raises(PierError, match="interrupted while it exchanged"):
        scene.step(site)


def test_the_state_is_that_at_the_beginning_of_the_round(scene: Scene) -> None:
    first = Train(1, 20, 4, scene.anchor.path, forget=False, round=2, sites=3, losses={"lab-b": 2.5})
    site = scene.joined(first)
    assert site.state == State(round=2, step=20, sites=3, slot=0, losses={"lab-b": 2.5})
    scene.step(site)
    scene.step(site)
    assert (site.state.round, site.state.step, site.state.sites) == (2, 22, 3)


def test_what_is_logged_is_told_by_the_end_of_the_round_the_last_value_of_each_name(scene: Scene) -> None:
    site = scene.joined(scene.train(4, first=20))
    scene.step(site)
    site.log({"accuracy": torch.tensor(0.25), "stage": "warm"})
    scene.step(site)
    scene.step(site)
    site.log({"accuracy": np.float32(0.5), "steps": 3})
    scene.steps(site, [None], then=scene.train(4, first=24))
    scene.done()
    told: dict[str, float | str] = {}
    for _, metrics in scene.logged:
        told |= metrics
    assert told == {"accuracy": 0.5, "stage": "warm", "steps": 3.0}
    assert scene.logged[-1][0] == 23


def test_what_is_logged_last_is_told_when_the_site_is_closed(scene: Scene) -> None:
    site = scene.joined(Over(""))
    site.log({"accuracy": 1.0})
    assert isinstance(scene.hear(), Ready)
    site.close()
    assert scene.hear() == Logged(site.total_steps, {"accuracy": 1.0})


def test_what_does_not_fit_is_left_out_with_one_warning_a_name(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    site = scene.joined(Over(""))
    assert isinstance(scene.hear(), Ready)
    wrong: dict[str, Any] = {"loss": math.nan, "text": "x" * 201, "list": [1.0], "two": torch.zeros(2), "a\n": 1.0}
    wrong |= {"lone": "\ud800", "": 1.0, "a/b/c/d/e": 1.0, "\u00b2": 1.0}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            site.log({**wrong, "right": 1})
    site.log({f"name {index}": index for index in range(100)})
    site.close()
    told = scene.hear()
    assert isinstance(told, Logged)
    assert [*told.metrics] == [f"name {index}" for index in range(36, 100)]
    assert caplog.text.count("site.log leaves out") == len(wrong)
    assert "site.log leaves out 'loss': nan" in caplog.text


def test_ranks_look_for_a_stop_once_a_second(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = [0.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    look = DaemonConnection.look

    def noted(link: DaemonConnection, again: int) -> tuple[bool, int]:
        looks.append(clock[0])
        return look(link, again)

    monkeypatch.setattr(DaemonConnection, "look", noted)
    site = scene.joined(scene.train(1_000))
    for seconds, count in ((3.0, 20), (0.01, 500)):
        looks.clear()
        for _ in range(count):
            clock[0] += seconds
            scene.step(site)
        assert max(after - before for before, after in pairwise(looks)) <= max(client.LOOK_SECONDS, seconds) + 1e-6
        assert len(looks) < 22


def test_a_program_may_have_thousands_of_open_files(scene: Scene) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    try:
        with scene.renumbered(2000):
            site = scene.joined(scene.train(100))
            scene.step(site)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_daemon_that_has_gone_is_an_error(scene: Scene) -> None:
    site = scene.joined(scene.train(1_000))
    scene.end()
    with pytest.raises(PierError, match="daemon has ended"):
        scene.step(site)


def test_a_daemon_that_has_gone_with_its_memory_is_an_error(scene: Scene) -> None:
    """It may end after it has been told something, and before its memory is mapped."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    gone = f"/proc/{ended.pid}/fd/3"
    site = scene.joined(scene.train(1))
    scene.say(replace(scene.train(1, first=1), load=gone))
    with pytest.raises(PierError, match="daemon has ended"):
        scene.step(site)


def test_a_daemon_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ENGINE_VARIABLE, str(tmp_path / "socket"))
    with pytest.raises(PierError, match="daemon has ended"):
        join(nn.Linear(2, 1), step_tokens=8)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"step_tokens": 0}, "step_tokens = 0"),  # a site whose steps have none would never bring what it has learnt
    ({"step_tokens": 8.5}, "step_tokens = 8.5"),
    ({"config": "/nowhere/run.toml"}, "/nowhere/run.toml: No such file"),
    ({"config": {"run": {"name": Path("a")}}}, "Path is not JSON serializable"),
    ({"optimizer": [[torch.optim.SGD([torch.zeros(1)])]]}, "a list of several, and not a list"),
    ({"optimizer": {"adam": torch.optim.SGD([torch.zeros(1)])}}, "a list of several, and not a dict"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_what_cannot_be_right_is_refused_before_a_daemon_is_started(
    wrong: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object) -> None:
        pytest.fail("a daemon is started")

    monkeypatch.setattr("pier_node.engine.join.Daemon", started)
    with pytest.raises(PierError, match=words):
        join(nn.Linear(2, 1), **{"step_tokens": 8, "folder": "/nowhere", **wrong})


def test_what_accelerate_makes_of_an_optimizer_is_the_optimizer(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps could not be counted, and its state would count as that of any other kind."""
    prepared = pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(scene.optimizer)
    with scene.listening(monkeypatch), join(scene.model, prepared, step_tokens=np.int64(8)) as site:
        prepared.step()
        assert site.step_index == 1


def test_a_process_that_is_a_site_already_has_to_close_it_first(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    with scene.listening(monkeypatch):
        site = join(scene.model, scene.optimizer, step_tokens=8)
        with pytest.raises(PierError, match="this process is a site in") as refused:
            join(scene.model, scene.optimizer, step_tokens=8)
        site.close()
    assert "site.close()" in refused.value.remedy


def test_ctrl_c_while_a_daemon_starts_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (python := tmp_path / "python").write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 1000\n")
    python.chmod(0o755)

    interrupts = [KeyboardInterrupt()]

    def interrupted(_: float) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() and interrupts:
            raise interrupts.pop()

    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", str(python))
        patch.setattr(time, "sleep", interrupted)
        patch.setattr("pier_node.engine.join.END_SECONDS", 0.01)
        with pytest.raises(KeyboardInterrupt):
            join(nn.Linear(2, 1), step_tokens=8, folder=tmp_path / "data")
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
