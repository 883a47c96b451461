"""The board: small runs with known results, and facts in no order at all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
from coordinator.played import LABS, START, Played, Replayed, node, pulse
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_coordinator.runs.read_model import (
    EVENTS,
    FEW_SITES,
    MOST_SITES,
    POINTS,
    SAMPLES,
    WINDOW,
    Latest,
    ReadModel,
)
from pier_coordinator.runs.sites import LINES, SILENT_AFTER
from pier_coordinator.store.facts import Fact, Kind, event
from pier_coordinator.store.snapshots import pack, unpack
from pier_node.config.run import RunConfig

A, B, C = (node(lab.name) for lab in LABS)
KEYS = (
    "round compute waiting loss tokens_per_second validation_loss peer bandwidth level text name rounds activity state "
    "inner_step bytes_sent memory phase time sample"
)
ODD = st.sampled_from(
    [None, True, -1, 0, 3, 70_000, 2**70, 0.5, -2.5, math.nan, math.inf, 1e300, "", "a", "\x1b\n", [1]]
)
BODIES = st.dictionaries(st.sampled_from(KEYS.split()), ODD, max_size=8)
FACTS = st.builds(
    Fact,
    time=st.floats(-1e12, 1e12),
    kind=st.sampled_from(get_args(Kind)),
    node=st.sampled_from(["", "a", "b", "c"]),
    body=BODIES,
)


def played(**how: Any) -> ReadModel:
    return Replayed(Played(**how).facts())


def row(board: ReadModel, name: str) -> dict[str, Any]:
    (found,) = [it for it in board.snapshot()["sites"] if it["name"] == name]
    return dict(found)


@pytest.mark.parametrize("kind", ["order", "event"])
def test_what_the_operator_or_the_coordinator_says_of_a_site_is_no_word_from_it(kind: Kind) -> None:
    now = START
    board = ReadModel(clock=lambda: now)
    board.apply(Fact(START, "site", A, {"name": "lab-a"}))
    now += 600
    board.apply(Fact(now, kind, A, {"text": "stopped by the operator"}))
    assert board.sites[A].heard == START


def test_a_gradient_norm_that_was_not_measured_is_no_point_of_its_curve() -> None:
    board = Replayed([Fact(START, "site", A, {"name": "lab-a"})])
    for turn, norm in enumerate((0.0, 1.5)):
        board.apply(Fact(START + 10 * turn, "sample", A, {"inner_step": turn, "gradient_norm": norm}))
    (told,) = board.curves_of([A], 0).values()
    assert told["gradient_norm"]["mean"] == [1.5]


@given(st.lists(FACTS, max_size=40), st.lists(FACTS, max_size=20))
def test_a_snapshot_replaces_the_facts_that_it_was_made_of(before: list[Fact], after: list[Fact]) -> None:
    whole, again = Replayed(), Replayed()
    for fact in before:
        whole.apply(fact)
    for part in whole.parts():
        again.restore(unpack(pack(part)))
    again.newest = whole.newest
    for fact in after:
        whole.apply(fact)
        again.apply(fact)
    assert shown(again) == shown(whole)


def test_curves_and_rounds_are_as_they_were_after_a_snapshot() -> None:
    board = played(rounds=700, retried=(3, 650))
    again = ReadModel(board.now)
    for part in board.parts():
        again.restore(unpack(pack(part)))
    assert shown(again) == shown(board)
    assert again.curves_of([A, B, C]) == board.curves_of([A, B, C])
    assert again.rounds_of(600, 700) == board.rounds_of(600, 700)
    assert again.lines_of(A) == board.lines_of(A)
    board.pulse(A, pulse(LABS[0], 701), True)
    again.pulse(A, pulse(LABS[0], 701), True)
    assert again.totals() == board.totals()


def shown(board: ReadModel) -> dict[str, Any]:
    """All that the page shows of it, without stamps."""
    board.refresh()
    told = json.loads(json.dumps(board.snapshot()))
    told["events"] = [{**it, "stamp": 0} for it in told["events"]]
    told["samples"] = [{**it, "stamp": 0} for it in told["samples"]]
    told["links"] = sorted(({**it, "stamp": 0} for it in told["links"]), key=json.dumps)
    return {**told, "boot": "", "stamp": 0}


@given(st.lists(st.one_of(FACTS, st.tuples(st.sampled_from("ab"), BODIES, st.booleans())), max_size=40))
@settings(max_examples=150)
def test_no_fact_and_no_pulse_is_an_error_in_whatever_order(told: list[Any]) -> None:
    board = Replayed()
    for it in told:
        if isinstance(it, Fact):
            board.apply(it)
        else:
            board.pulse(*it)
    assert json.loads(json.dumps(board.snapshot(), allow_nan=False))["stamp"] == board.stamp
    json.dumps(board.rounds_of(0, 2**50), allow_nan=False)


def test_a_run_is_summed_up() -> None:
    board = played(rounds=60)
    told = board.snapshot()
    assert told["run"]["name"] == "atlantic"
    assert told["totals"] | {
        "loss": 0,
        "seconds": 0,
        "seconds_left": 0,
        "round_seconds": 0,
        "tokens_per_second": 0,
    } == {
        "inner_step": 3000,
        "learning_rate": None,
        "round": 60,
        "sites": 3,
        "alive": 3,
        "paused": 0,
        "tokens": 60 * 25 * (9800 + 5200 + 10400),
        "tokens_per_second": 0,
        "loss": 0,
        "validation_loss": pytest.approx(2.2855, abs=1e-3),
        "bytes_sent": 3 * 60 * 10_600_000,
        "round_seconds": 0,
        "seconds": 0,
        "seconds_left": 0,
    }
    assert told["totals"]["tokens_per_second"] == pytest.approx(25_400, rel=0.03)
    assert told["totals"]["seconds_left"] == pytest.approx(40 * told["totals"]["round_seconds"], rel=1e-4)


def test_the_page_gets_the_configuration_without_thousands_of_names() -> None:
    tensors = [f"layer.{number}.weight 2x3" for number in range(300)]
    about = {"config": '{"model_type":"qwen3"}', "tensors": tensors}
    model = {"form": "transformers", "transformers": about}
    shown = ReadModel(config=RunConfig.model_validate({"model": model})).snapshot()["config"]
    assert shown["model.transformers"] == {**about, "tensors": "300 names and shapes"}
    assert shown["model"]["form"] == "transformers"
    program = {"step_tokens": 9, "tensors": tensors}
    shown = ReadModel(config=RunConfig.model_validate({"program": program})).snapshot()["config"]
    assert shown["program"] == {**program, "tensors": "300 names and shapes"}


def test_the_loss_of_the_run_is_the_mean_of_all_sites_whoever_told_last() -> None:
    board = played(rounds=20)
    curve = board.curves["loss"]
    for lab in LABS:
        board.apply(Fact(START + 1e6, "sample", node(lab.name), {"loss": 1.0}))
    board.apply(Fact(START + 1e6 + 9, "sample", A, {"loss": 4.0}))
    assert curve.last() == pytest.approx(2.0)


def test_what_an_older_site_does_not_tell_of_its_machine_is_not_known() -> None:
    board = ReadModel(clock=lambda: START)
    board.apply(Fact(START, "sample", A, {"loss": 2.0, "device": "", "device_memory": 0, "mfu": 0.0, "cpu": 0.0}))
    board.apply(
        Fact(START, "sample", B, {"loss": 2.0, "device": "8 x H100", "device_memory": 5, "mfu": 0.4, "cpu": 0.5})
    )
    rows = {site["node"]: site for site in board.snapshot()["sites"]}
    keys = ("device", "device_memory", "mfu", "cpu")
    assert [rows[A][key] for key in keys] == ["", None, None, None]
    assert [rows[B][key] for key in keys] == ["8 x H100", 5, 0.4, 0.5]


def test_a_site_has_its_row() -> None:
    site = row(played(rounds=20, late=3), "lab-b")
    assert (site["node"], site["state"], site["round"], site["lag"]) == (B, "silent", 17, 3)
    assert (site["transport"], site["version"], site["workers"]) == ("grpc", "0.1.0", 2)
    assert site["uplink"] == pytest.approx(0.5e6, rel=0.1)
    assert site["utilisation"] == pytest.approx(0.66, abs=0.07)


def test_curves_are_those_of_each_site_and_of_all() -> None:
    board = played(rounds=40)
    for curve in [*board.curves_of([A, B])[A].values(), *board.snapshot()["curves"].values()]:
        assert curve["x"] == sorted(curve["x"])
        assert len(curve["x"]) == len(curve["mean"]) <= POINTS
    assert board.snapshot()["curves"]["validation_loss"]["x"] == [5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0]
    assert board.curves_of(["nobody"]) == {}


def test_rounds_are_told_site_by_site_and_in_words() -> None:
    told = played(rounds=30).rounds_of(11, 30)
    assert [site["name"] for site in told["sites"]] == ["lab-a", "lab-b", "lab-c"]
    assert [len(site["segments"]) for site in told["sites"]] == [20, 20, 20]
    assert "lab-b was slowest in" in told["words"]
    assert "The thinnest uplink is that of lab-b" in told["words"]
    retried = [segment for segment in told["sites"][0]["segments"] if segment[0] == 17]
    assert retried[0][5] == 6.4


def test_sites_come_by_name_in_whatever_order_they_joined() -> None:
    board = Replayed()
    for name in ("lab-10", "beta", "lab-2", "2"):
        board.apply(Fact(START, "site", node(name), {"name": name}))
        board.apply(Fact(START, "round", node(name), {"round": 1, "compute": 1.0}))
    assert [site["name"] for site in board.snapshot()["sites"]] == ["2", "beta", "lab-2", "lab-10"]
    assert [site["name"] for site in board.rounds_of(1, 1)["sites"]] == ["2", "beta", "lab-2", "lab-10"]


def test_only_what_changed_is_told_again() -> None:
    board = played(rounds=10)
    seen = board.snapshot()["stamp"]
    assert board.changes(seen)["sites"] == []
    board.apply(Fact(Played(rounds=10).end + 1, "sample", A, {"loss": 2.0, "tokens_per_second": 9000.0}))
    told = board.changes(seen)
    assert [(site["node"], "name" in site) for site in told["sites"]] == [(A, False)]
    assert [name for name, curve in told["curves"].items() if curve["x"]] == [
        *("loss", "tokens_per_second", "inner_step", "tokens", "round")
    ]
    assert told["events"] == told["links"] == told["rounds"]["rows"] == []
    assert not told["full"]


def test_a_snapshot_and_changes_come_to_the_same_as_a_later_snapshot() -> None:
    facts = Played(rounds=30).facts()
    board = Replayed()
    merged: dict[str, Any] = {}
    seen = 0
    for at, fact in enumerate(facts):
        board.apply(fact)
        if at % 37 == 0 or fact is facts[-1]:
            told = board.changes(seen)
            for site in told["sites"]:
                merged[site["node"]] = merged.get(site["node"], {}) | site
            seen = told["stamp"]
    top = board.round
    fresh = {site["node"]: site for site in board.snapshot()["sites"]}
    assert {key: it | {"lag": top - it["round"]} for key, it in merged.items()} == fresh


def test_a_pulse_is_what_is_live_only() -> None:
    now = START
    board = ReadModel(clock=lambda: now)
    board.pulse(A, pulse(LABS[0], 7, 3.0, "PHASE_CATCHING_UP"), alive=True)
    told = board.snapshot()
    assert (told["sites"][0]["state"], told["sites"][0]["round"]) == ("catching up", 7)
    assert (told["sites"][0]["tokens_per_second"], told["totals"]["tokens_per_second"]) == (0, 0)  # it does not train
    board.pulse(A, pulse(LABS[0], 7, 3.0), alive=True)
    told = board.snapshot()
    assert told["sites"][0]["tokens_per_second"] == told["totals"]["tokens_per_second"] == LABS[0].speed
    assert board.sites[A].offset == 3.0
    assert board.sites[A].heard == now


def test_who_is_paused_does_nothing_for_the_run() -> None:
    board = ReadModel(clock=lambda: START)
    board.pulse(A, pulse(LABS[0], 7), alive=True)
    board.pulse(B, pulse(LABS[0], 7, phase="PHASE_PAUSED"), alive=True)
    totals = board.totals()
    assert (totals["alive"], totals["paused"], totals["tokens_per_second"]) == (2, 1, LABS[0].speed)
    board.pulse(A, pulse(LABS[0], 7, phase="PHASE_PAUSED"), alive=True)
    totals = board.totals()
    assert (totals["alive"], totals["paused"], totals["tokens_per_second"]) == (2, 2, 0)
    assert totals["seconds_left"] is None


def revoke(board: ReadModel, now: float) -> None:
    board.apply(event(now, "lab-b was revoked", B, 30, "revoked"))


def finish(board: ReadModel, now: float) -> None:
    board.pulse(B, pulse(LABS[1], 7, phase="PHASE_DONE"), alive=True)
    board.apply(Fact(now, "sample", B, {"tokens_per_second": 0.0}))


def fall_silent(board: ReadModel, now: float) -> None:
    board.pulse(B, {}, alive=False)
    board.apply(event(now, "lab-b is silent", B, 30, "silent"))


def pause(board: ReadModel, now: float) -> None:
    board.pulse(B, pulse(LABS[1], 7, phase="PHASE_PAUSED"), alive=True)
    board.apply(Fact(now, "sample", B, {"tokens_per_second": 0.0}))


@pytest.mark.parametrize("end", [revoke, finish, fall_silent, pause])
def test_who_trains_no_more_has_no_speed_and_the_run_has_one(end: Callable[[ReadModel, float], None]) -> None:
    now = START
    board = ReadModel(clock=lambda: now)
    for lab in LABS[:2]:
        board.pulse(node(lab.name), pulse(lab, 7), alive=True)
        board.apply(Fact(now, "sample", node(lab.name), {"tokens_per_second": lab.speed}))
    assert board.snapshot()["totals"]["tokens_per_second"] == LABS[0].speed + LABS[1].speed
    now += 10
    end(board, now)
    told = board.snapshot()
    assert {site["node"]: site["tokens_per_second"] for site in told["sites"]} == {A: LABS[0].speed, B: 0.0}
    assert told["totals"]["tokens_per_second"] == told["curves"]["tokens_per_second"]["mean"][-1] == LABS[0].speed


def test_a_site_whose_lease_ran_out_is_silent_and_counts_no_more() -> None:
    board = ReadModel(clock=lambda: START)
    board.pulse(A, pulse(LABS[0], 7), alive=True)
    board.pulse(A, {}, alive=False)
    told = board.snapshot()
    assert told["sites"][0]["state"] == "silent"
    assert told["totals"]["tokens_per_second"] == 0
    board.pulse(A, pulse(LABS[0], 7), alive=True)
    assert board.snapshot()["sites"][0]["state"] == "training"


@pytest.mark.parametrize(("phase", "state"), [("leaving", "left"), ("PHASE_DONE", "done"), ("training", "silent")])
def test_a_site_that_took_its_leave_is_not_missed(phase: str, state: str) -> None:
    board = ReadModel(clock=lambda: START)
    board.pulse(A, {"phase": phase}, alive=True)
    board.pulse(A, {}, alive=False)
    assert board.snapshot()["sites"][0]["state"] == state


def test_in_a_replay_a_site_falls_silent_by_the_time_of_the_facts() -> None:
    board = Replayed()
    board.apply(Fact(START, "sample", A, {"inner_step": 1}))
    board.apply(Fact(START + SILENT_AFTER, "sample", B, {"inner_step": 1}))
    assert row(board, A[:12])["state"] == "training"
    seen = board.stamp
    board.apply(Fact(START + SILENT_AFTER + 1, "sample", B, {"inner_step": 2}))
    assert {site["node"]: site["state"] for site in board.changes(seen)["sites"]}[A] == "silent"


def test_after_a_restart_sites_get_time_to_come_back() -> None:
    now = START + 1000
    board = ReadModel(clock=lambda: now)
    board.apply(Fact(START, "sample", A, {"inner_step": 1}))
    assert board.snapshot()["sites"][0]["state"] == "training"
    now += SILENT_AFTER + 1
    assert board.snapshot()["sites"][0]["state"] == "silent"


def test_after_a_restart_a_finished_run_is_shown_as_before() -> None:
    now = START
    live, again = (ReadModel(clock, RunConfig()) for clock in (lambda: now, lambda: START + 4000))
    facts = [Fact(START, "run", "", {"rounds": 12})]
    facts += [Fact(START + 1, "site", A, {"name": "lab-a"})]
    facts += [Fact(START + 10 * it, "sample", A, {"inner_step": 280 * it, "tokens_per_second": 9.0}) for it in (1, 2)]
    facts += [Fact(START + 22, "round", A, {"round": 12, "inner_step": 600, "tokens": 6000, "compute": 1.0})]
    facts += [Fact(START + 23, "sample", A, {"inner_step": 600, "tokens": 6000, "tokens_per_second": 0.0})]
    facts += [event(START + 38, "lab-a has left", A, 20, "left")]
    for fact in facts:
        now = fact.time
        live.pulse(A, {"phase": "training", "round": 11, "inner_step": 590}, alive=True)
        live.apply(fact)
    live.pulse(A, {"phase": "done", "round": 12, "inner_step": 600, "tokens": 6000}, alive=True)
    live.pulse(A, {}, alive=False)
    for fact in facts:
        again.apply(fact)
    again.pulse(A, dict.fromkeys(pulse(LABS[0], 1)), alive=False)
    before, after = live.snapshot(), again.snapshot()
    assert after["totals"] == before["totals"]
    assert after["totals"]["inner_step"] == 600
    assert after["curves"] == before["curves"]
    assert after["curves"]["tokens_per_second"]["x"] == [START + 10, START + 20, START + 23]
    assert [site["state"] for site in after["sites"]] == [site["state"] for site in before["sites"]] == ["done"]


def test_orders_and_a_revocation_are_shown() -> None:
    board = played(rounds=3)
    end = Played(rounds=3).end
    board.apply(Fact(end, "order", A, {"activity": "ACTIVITY_PAUSE", "assignment": "replica", "text": "paused by x"}))
    board.apply(Fact(end, "event", B, {"level": 30, "text": "revoked", "state": "revoked"}))
    assert (row(board, "lab-a")["activity"], row(board, "lab-a")["assignment"]) == ("pause", "replica")
    assert row(board, "lab-b")["state"] == "revoked"
    assert [event["text"] for event in board.events()[-2:]] == ["paused by x", "revoked"]


def test_what_a_revoked_site_claimed_makes_nobody_late() -> None:
    live = played(rounds=3)
    end = Played(rounds=3).end
    before = live.totals()
    live.pulse(C, pulse(LABS[2], 2**40), alive=True)
    assert row(live, "lab-a")["lag"] == 2**40 - 3
    assert live.totals()["inner_step"] == 50 * 2**40
    live.apply(Fact(end, "event", C, {"level": 30, "text": "lab-c was revoked", "state": "revoked"}))
    assert row(live, "lab-a")["lag"] == 0
    assert [live.totals()[key] for key in ("round", "inner_step")] == [before[key] for key in ("round", "inner_step")]


def test_what_arrives_of_a_site_after_it_was_revoked_counts_no_more() -> None:
    live = played(rounds=3)
    before, end = live.totals(), Played(rounds=3).end
    live.apply(Fact(end, "event", C, {"level": 30, "text": "lab-c was revoked", "state": "revoked"}))
    live.apply(Fact(end, "round", C, {"round": 2**40, "tokens": 1e15, "began": end - 1.0, "validation_loss": 1e9}))
    live.apply(Fact(end, "sample", C, {"inner_step": 2**40, "loss": 1e9}))
    live.pulse(C, pulse(LABS[2], 2**40), alive=True)
    assert row(live, "lab-a")["lag"] == 0
    for key in ("round", "inner_step", "tokens", "validation_loss"):
        assert live.totals()[key] == before[key], key


def test_a_revoked_site_stays_revoked_and_loses_its_links() -> None:
    live = played(rounds=3, silent=2)
    end = Played(rounds=3).end
    live.apply(Fact(end, "event", C, {"level": 30, "text": "lab-c was revoked", "state": "revoked"}))
    live.pulse(C, {}, alive=False)
    live.apply(Fact(end + 2 * SILENT_AFTER, "link", A, {"peer": C, "bandwidth": 1e6}))
    site = row(live, "lab-c")
    assert (site["state"], site["lag"]) == ("revoked", 0)
    assert live.totals()["sites"] == 2, "it is not waited for"
    assert {node for link in live.snapshot()["links"] for node in (link["node"], link["peer"])} == {A, B}


def test_events_are_the_last_ones_and_have_the_site_s_name() -> None:
    board = played(rounds=1)
    for number in range(1000, 1000 + EVENTS + 50):
        board.apply(Fact(START + 1, "note", A, {"level": 30, "text": f"note {number}"}, number))
    events = board.events()
    assert len(events) == EVENTS
    assert (events[-1]["text"], events[-1]["name"], events[-1]["level"]) == ("note 1549", "lab-a", 30)
    assert [event["number"] for event in board.events(after=1547)] == [1548, 1549]


def test_events_come_in_the_order_in_which_they_happened() -> None:
    board = Replayed()
    for text, at in [("late", 5.0), ("early", 1.0), ("between", 3.0), ("late too", 5.0)]:
        board.apply(Fact(START + at, "note", A, {"level": 30, "text": text}))
    assert [event["text"] for event in board.events()] == ["early", "between", "late", "late too"]


def test_memory_is_bounded_in_sites_and_texts() -> None:
    board = Replayed()
    for number in range(MOST_SITES + 100):
        board.apply(Fact(START, "note", f"node-{number}", {"level": 30, "text": "x" * 10_000}))
    assert len(board.sites) == MOST_SITES
    assert max(len(event["text"]) for event in board.events()) == 500


def test_with_many_sites_links_and_rounds_of_all_are_not_told_unasked() -> None:
    board = Replayed()
    for number in range(FEW_SITES + 6):
        name = f"node-{number:02}"
        board.apply(Fact(START, "link", name, {"peer": "node-00", "bandwidth": 1e6}))
        board.apply(Fact(START, "round", name, {"round": 1, "compute": float(number)}))
    assert board.snapshot()["links"] == []
    told = board.rounds_of(1, 1)
    assert [site["node"] for site in told["sites"][:2]] == ["node-29", "node-28"]
    assert len(told["sites"]) == FEW_SITES
    assert [site["node"] for site in board.rounds_of(1, 1, ["node-03"])["sites"]] == ["node-03"]


def test_each_board_has_a_name_of_its_own() -> None:
    assert ReadModel().boot != ReadModel().boot


def test_the_last_lines_of_a_site_s_log_are_kept_and_only_warnings_are_events() -> None:
    board = Replayed()
    for number in range(LINES + 5):
        level = 30 if number == LINES else 20
        board.apply(Fact(START + number, "note", node("lab-a"), {"level": level, "text": f"<b>{number}\n" * 300}))
    lines = board.lines_of(node("lab-a"))
    assert len(lines) == LINES
    assert lines[0][:2] == (START + 5, 20)
    assert lines[-1][2].startswith(f"<b>{LINES + 4} <b>")
    assert len(lines[-1][2]) <= 500
    assert [event["level"] for event in board.events()] == [30]
    assert board.lines_of("nobody") == []


def test_a_norm_of_gradients_has_a_curve_if_sites_tell_it() -> None:
    board = Replayed()
    for name, norm in (("lab-a", 0.5), ("lab-b", 1.5), ("lab-c", 0.0)):  # 0: an earlier version tells none
        board.apply(Fact(START, "sample", node(name), {"inner_step": 1, "gradient_norm": norm}))
    assert board.curves["gradient_norm"].means() == [0.75]
    assert [row(board, node(lab.name)[:12])["gradient_norm"] for lab in LABS] == [0.5, 1.5, None]


def test_a_plan_of_experts_is_told_when_it_has_changed() -> None:
    board = Replayed()
    assert board.snapshot()["experts"] is None
    plan = {"plan": "ab" * 16, "rows": [{"domain": "topics", "done": 1, "loss": 1 / 3}]}
    board.planned(plan)
    seen = board.snapshot()
    assert seen["experts"]["rows"] == [{"domain": "topics", "done": 1, "loss": 0.333333}]
    board.planned(plan)
    board.apply(Fact(START, "note", node("lab-a"), {"level": 30, "text": "hello"}))
    assert board.changes(seen["stamp"])["experts"] is None
    board.planned({**plan, "rows": [{"domain": "topics", "done": 2, "loss": None}]})
    assert board.changes(seen["stamp"])["experts"]["rows"][0]["done"] == 2


def taken(*told: tuple[str, float, float]) -> Latest:
    latest = Latest()
    for who, time, value in told:
        latest.take(who, time, value)
    return latest


def test_the_latest_values_of_all_sites_are_added() -> None:
    assert taken(("a", 0.0, 10.5)).sum == 10.5
    assert taken(("a", 0.0, 10.5), ("b", 1.0, 20.0)).sum == 30.5
    assert taken(("a", 0.0, 10.5), ("b", 1.0, 20.0), ("a", 2.0, 11.0)).sum == 31.0


def test_the_mean_is_that_of_all_sites_whoever_told_last() -> None:
    assert taken(("a", 0.0, 2.394), ("b", 0.5, 2.337), ("c", 1.0, 2.608)).mean == pytest.approx(2.446333)
    assert taken(("a", 0.0, 2.394), ("c", 1.0, 2.608), ("b", 9.5, 2.337)).mean == pytest.approx(2.446333)


def test_a_site_that_says_nothing_is_not_counted_any_more() -> None:
    told = ("a", 0.0, 10.0), ("b", WINDOW, 20.0), ("b", WINDOW + 1, 20.0)
    assert (taken(*told).sum, taken(*told).mean) == (20.0, 20.0)


def test_a_site_that_has_gone_is_forgotten_at_once() -> None:
    latest = taken(("a", 0.0, 10.0), ("b", 1.0, 20.0))
    assert (latest.forget("a"), latest.forget("a"), latest.sum, latest.mean) == (True, False, 20.0, 20.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e4), st.floats(0, 1e9)), min_size=1))
def test_the_sum_does_not_drift(told: list[tuple[str, float, float]]) -> None:
    latest = taken(*told)
    assert latest.sum >= told[-1][2] - 1e-6
    for who in "abc":
        latest.take(who, 2e4, 0.0)
    latest.take("a", 2e4, 1.0)
    assert latest.sum == pytest.approx(1.0)


def test_samples_of_text_are_kept_once_bounded_and_without_control_characters() -> None:
    board = ReadModel(lambda: START)
    for number in range(1, SAMPLES + 3):
        for name in (A, B):
            board.apply(Fact(START, "round", name, {"round": number, "sample": f"round {number}\x1b[2J\n" + "x" * 900}))
    board.apply(Fact(START, "round", C, {"round": SAMPLES + 3, "sample": ["no text"]}))
    before, kept = board.stamp, board.snapshot()["samples"]
    assert [it["round"] for it in kept] == [*range(3, SAMPLES + 3)]
    assert {it["node"] for it in kept} == {A}
    assert kept[0]["text"] == ("round 3 [2J " + "x" * 900)[:500]
    board.apply(Fact(START, "round", B, {"round": 99, "sample": "other bits"}))
    assert [it["text"] for it in board.changes(before)["samples"]] == ["other bits"]
