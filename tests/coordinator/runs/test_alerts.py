"""Each alert, and that it does not come when all is well."""

from __future__ import annotations

import re
from typing import Any

import pytest
from coordinator.played import LABS, START, Played, Replayed, node, pulse

from pier_coordinator.runs.alerts import MOST, STAYS, Alert, Watch, payload, shorter_exchange
from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.runs.timings import Segment
from pier_coordinator.store.facts import Fact

A, B, C = (node(lab.name) for lab in LABS)


class Live:
    """A board with a clock of its own; its three sites are there, and well."""

    def __init__(self, **how: Any) -> None:
        made = Played(**{"rounds": 30, "retried": (), **how})
        self.now = made.end
        self.rounds = made.rounds
        self.board = ReadModel(clock=lambda: self.now)
        self.watch = Watch()
        for fact in made.facts():
            self.board.apply(fact)
        for lab in LABS:
            self.beat(lab.name)

    def beat(self, name: str, **changes: Any) -> None:
        lab = next(lab for lab in LABS if lab.name == name)
        self.board.pulse(node(name), {**pulse(lab, self.rounds), **changes}, alive=True)

    def tell(self, kind: Any, node: str, **body: Any) -> None:
        self.board.apply(Fact(self.now, kind, node, body))

    def alerts(self) -> dict[str, Alert]:
        return {alert.kind: alert for alert in self.watch.look(self.board)}

    def rest(self) -> None:
        """Longer than an alert lingers."""
        self.now += STAYS + 1


def test_there_is_no_alert_when_all_is_well() -> None:
    assert Live().alerts() == {}


def test_there_is_no_alert_without_a_run() -> None:
    assert Watch().look(ReadModel(clock=lambda: START)) == []


def test_a_disk_that_takes_nothing() -> None:
    live = Live()
    live.board.problem = "database or disk is full"
    alert = live.alerts()["disk"]
    assert (alert.severity, alert.node) == ("error", "")
    assert alert.text == "the coordinator cannot store anything: database or disk is full"
    live.board.problem = ""
    live.rest()
    assert "disk" not in live.alerts()


def test_a_silent_site() -> None:
    live = Live()
    live.board.pulse(C, {}, alive=False)
    assert live.alerts()["silent"].text == "lab-c: silent for less than a minute"
    live.now += 61
    assert live.alerts()["silent"].text == "lab-c: silent for a minute"
    live.now += 139
    alert = live.alerts()["silent"]
    assert (alert.severity, alert.node, alert.text) == ("error", C, "lab-c: silent for 3 min")
    assert "pier-node status" in alert.remedy


def test_a_silent_site_of_a_replay() -> None:
    board = Replayed(Played(rounds=30, silent=8, retried=()).facts())
    (silent,) = Watch().look(board)
    assert silent.text.startswith("lab-c: silent for ")


def test_sites_that_wait_for_a_majority() -> None:
    live = Live()
    for name in ("lab-b", "lab-c"):
        live.board.pulse(node(name), {}, alive=False)
    live.beat("lab-a", phase="PHASE_WAITING")
    assert "stalled" not in live.alerts()
    live.now += 3600
    live.beat("lab-a", phase="PHASE_WAITING")
    alert = live.alerts()["stalled"]
    assert (alert.severity, alert.node) == ("error", "")
    assert alert.text == "no round for 60 min: all that are here wait, 1 of 3 sites"
    assert "for a majority: lab-b, lab-c" in alert.remedy
    live.beat("lab-b", phase="PHASE_TRAINING")
    live.rest()
    assert "stalled" not in live.alerts()


def test_a_run_that_waits_for_its_first_sites_is_not_stalled() -> None:
    live = Live(run={"sites": 4})
    live.now += 3600
    for name in ("lab-a", "lab-b", "lab-c"):
        live.beat(name, phase="PHASE_WAITING")
    assert "stalled" not in live.alerts()


def test_a_late_site_is_told_with_its_uplink_and_what_to_do() -> None:
    live = Live(rounds=40, late=3)
    live.board.sites[B].round = 37
    alert = live.alerts()["late"]
    assert re.fullmatch(r"lab-b: 3 rounds late, uplink [34][.0-9]* Mbit/s", alert.text)
    assert alert.remedy == "try codec int4 or H = 200"


def test_a_late_site_does_not_flicker() -> None:
    live = Live()
    for round, seen in [(28, False), (27, True), (28, True), (29, True), (28, True)]:
        live.board.sites[B].round = round
        assert ("late" in live.alerts()) is seen, round
    live.board.sites[B].round = 29
    live.rest()
    assert live.alerts() == {}
    live.board.sites[B].round = 28
    assert live.alerts() == {}


@pytest.mark.parametrize("phase", ["PHASE_PAUSED", "PHASE_LEAVING"])
def test_a_site_that_rests_by_order_or_leaves_is_not_late(phase: str) -> None:
    live = Live(rounds=40, late=3)
    live.board.sites[B].round = 30
    assert "late" in live.alerts()
    live.rest()
    live.beat("lab-b", phase=phase)
    live.board.sites[B].round = 30
    assert "late" not in live.alerts()


def test_a_new_site_is_not_late() -> None:
    live = Live()
    live.tell("site", "d" * 32, name="lab-d")
    live.board.pulse("d" * 32, {"phase": "catching up", "round": 0}, alive=True)
    assert "late" not in live.alerts()


def slow(live: Live, compute: float, exchange: float, retry: float = 0.0) -> None:
    """Twenty rounds in which lab-b takes so long, and the others wait for it."""
    for round in range(31, 51):
        for site in (A, B, C):
            own = compute if site == B else 5.0
            parts = {"compute": own, "waiting": compute - own, "exchange": exchange, "retry": retry}
            live.tell("round", site, round=round, bytes_sent=round * 10_600_000, **parts)
    live.rounds = 50
    for lab in LABS:
        live.beat(lab.name)


def test_waits_that_dominate_name_the_slow_site() -> None:
    live = Live()
    slow(live, compute=40.0, exchange=1.0)
    alert = live.alerts()["waiting"]
    assert alert.text == (
        "sites wait for each other 57 % of the time: lab-b takes 41 s a round, the others 6 s, mostly compute"
    )
    assert alert.remedy == "see what slows lab-b down; outer.adaptive_steps = true, the default, has it do fewer steps"


def test_an_exchange_that_dominates_names_the_thinnest_line() -> None:
    live = Live()
    slow(live, compute=5.0, exchange=20.0)
    alert = live.alerts()["exchange"]
    assert alert.text.startswith("the exchange takes 80 % of the time; the thinnest uplink is that of lab-b, ")
    assert alert.remedy.startswith("try codec int4 and H = ")
    assert alert.remedy.endswith("overlap = true hides it")


@pytest.mark.parametrize(("compute", "exchange"), [(40.0, 1.0), (5.0, 20.0)])
def test_sites_of_a_pipeline_wait_for_their_microbatches_by_plan(compute: float, exchange: float) -> None:
    live = Live(run={"stages": 4})
    slow(live, compute, exchange)
    assert live.alerts() == {}


def test_many_retries() -> None:
    live = Live()
    slow(live, compute=5.0, exchange=1.0, retry=0.5)
    assert live.alerts()["retries"].text == "20 of the last 20 rounds needed another attempt"


def test_a_retry_now_and_then_is_no_alert() -> None:
    assert Live(retried=(17, 18, 25)).alerts() == {}


def test_a_loss_that_is_not_a_number() -> None:
    live = Live()
    live.beat("lab-a", loss=float("nan"))
    alert = live.alerts()["not finite"]
    assert alert.text == "lab-a: its loss is not a number any more"
    assert "inner.lr" in alert.remedy


def test_a_loss_that_is_not_known_yet_is_no_alert() -> None:
    live = Live()
    live.beat("lab-a", loss=float("nan"), inner_step=0, tokens_per_second=0.0)
    assert live.alerts() == {}


def validated(live: Live, *losses: float) -> None:
    """All sites measure these validation losses, one each five rounds."""
    for loss in losses:
        live.rounds += 5
        for site in (A, B, C):
            live.tell("round", site, round=live.rounds, validation_loss=loss)
    for lab in LABS:
        live.beat(lab.name)


def test_a_validation_loss_that_rises() -> None:
    live = Live()
    validated(live, 4.4)
    assert live.alerts() == {}
    validated(live, 4.3)
    alert = live.alerts()["rising"]
    assert alert.text.startswith("the validation loss rises: 4.3 now, 2.")
    live.rest()
    validated(live, 2.5)
    assert "rising" not in live.alerts()


def test_a_validation_that_is_worse_once_or_a_little_is_no_alert() -> None:
    live = Live()
    validated(live, 2.4, 2.9, 2.4, 2.45, 2.5)
    assert live.alerts() == {}


def test_the_noise_of_single_batches_is_no_alert() -> None:
    live = Live()
    for _ in range(60):
        live.now += 10
        for site in (A, B, C):
            live.tell("sample", site, loss=4.4, inner_step=1600, tokens_per_second=9000.0)
    assert live.alerts() == {}


@pytest.mark.parametrize(("offset", "way"), [(3700.0, "62 min ahead"), (-8.0, "8 s behind")])
def test_a_clock_that_is_off(offset: float, way: str) -> None:
    live = Live()
    live.beat("lab-b", offset=offset)
    alert = live.alerts()["clock"]
    assert (alert.node, alert.text) == (B, f"lab-b: its clock is {way}")
    assert "NTP" in alert.remedy


def test_when_all_clocks_differ_alike_it_is_the_coordinator_s() -> None:
    live = Live()
    for lab in LABS:
        live.beat(lab.name, offset=100.0)
    assert live.alerts() == {}


def test_lost_reports() -> None:
    live = Live()
    live.beat("lab-c", dropped=1200)
    assert live.alerts()["dropped"].text.startswith("lab-c: 1,200 of its reports were lost")


def test_memory_that_grows() -> None:
    live = Live()
    live.tell("sample", A, memory=5_000_000_000, loss=2.2)
    assert live.alerts()["memory"].text == "lab-a: its memory has grown from 2.1 GB to 5 GB"


def test_an_error_in_a_site_s_log_is_shown_for_a_while() -> None:
    live = Live()
    live.tell("note", B, level=40, text="/data: no space left on device")
    live.tell("note", C, level=30, text="only a warning")
    alert = live.alerts()["error"]
    assert (alert.node, alert.text) == (B, "lab-b: /data: no space left on device")
    live.now += 700
    assert live.alerts() == {}


def test_an_alert_keeps_the_time_at_which_it_came_up() -> None:
    live = Live()
    live.beat("lab-c", dropped=1)
    came = live.alerts()["dropped"].since
    live.now += 2
    assert live.alerts()["dropped"].since == came


def test_errors_come_first_and_there_are_never_too_many() -> None:
    board = ReadModel(clock=lambda: START)
    for number in range(50):
        board.pulse(f"node-{number}", {"phase": "training"}, alive=True)
        board.pulse(f"node-{number}", {"dropped": 3}, alive=number % 2 == 0)
    told = Watch().told(board)
    assert len(told) == MOST
    assert told[0]["severity"] == "error"
    assert told[0]["name"] == told[0]["node"][:12]


RUN: dict[str, Any] = {"codec": "none", "inner_steps": 50, "parameters": 5_000_000}


def segments(compute: float, sent: float) -> list[Segment]:
    return [Segment(round, 0.0, compute, 0.0, 5.0, 0.0, sent * round) for round in (1, 2, 3)]


def test_the_payload_is_as_measured_or_else_as_the_model_is_large() -> None:
    assert payload(RUN, segments(10, 7e6)) == 7e6
    assert payload(RUN, []) == 2 * 4 * 5_000_000
    assert payload({"codec": "topk", "parameters": 5}, []) is None
    assert payload({}, segments(10, 0)) is None


@pytest.mark.parametrize(
    ("codec", "steps", "sent", "uplink", "advice"),
    [
        ("none", 50, 5e6, 0.5e6, "try codec int4 or H = 200"),  # 10 s of 10 s: four times too long; int4 is 7.7 times
        ("none", 50, 40e6, 0.5e6, "try codec int4 and H = 250"),  # 80 s: 32 times
        ("bf16", 50, 5e6, 0.5e6, "try codec int4 and H = 55"),
        ("int4", 50, 5e6, 0.5e6, "try H = 200"),
        ("topk", 50, 5e6, 0.5e6, "try H = 200"),
        ("int4", None, 5e6, 0.5e6, "try 4 times as many inner steps between rounds"),
    ],
)
def test_it_says_which_codec_or_how_many_steps(codec: str, steps: int, sent: float, uplink: float, advice: str) -> None:
    run = {"codec": codec, "inner_steps": steps}
    assert shorter_exchange(run, segments(10, sent), uplink) == advice


def test_a_fast_line_is_not_to_blame() -> None:
    assert shorter_exchange(RUN, segments(10, 1e6), 50e6).startswith("its link is fast enough for this run")


def test_a_pipeline_has_no_codec() -> None:
    assert shorter_exchange({**RUN, "stages": 4}, segments(10, 5e6), 0.5e6).startswith("its log says what it fetches")


@pytest.mark.parametrize(("rows", "uplink"), [(segments(10, 1e6), None), ([], 1e6), (segments(0, 1e6), 1e6)])
def test_without_figures_it_says_how_to_get_them(rows: list[Segment], uplink: float | None) -> None:
    assert shorter_exchange({"codec": "none"}, rows, uplink).startswith("measure its link with pier-node doctor")
