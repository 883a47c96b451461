"""What Prometheus reads off the coordinator, and that the Grafana board asks for nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import aiohttp
from coordinator.page_cases import serving
from coordinator.played import LABS, Played, Replayed, node

from pier_coordinator.page.app import RUN, SITE
from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.store.facts import Fact
from pier_node.site.report import METRICS

DOCKER = Path(__file__).parents[3] / "docker"
OURS = {
    *(f"pier_{name}" for name in METRICS),
    *(f"pier_run_{name}" for name in RUN),
    *(f"pier_site_{name}" for name in SITE),
}


async def scraped(board: ReadModel) -> str:
    async with (
        serving(board) as address,
        aiohttp.ClientSession() as session,
        session.get(f"{address}/metrics") as answer,
    ):
        assert answer.status == 200
        return await answer.text()


def board(rounds: int = 10) -> ReadModel:
    return Replayed(Played(rounds=rounds).facts())


async def test_the_run_and_each_site_have_their_gauges() -> None:
    text = await scraped(board())
    assert 'pier_run_round{run="atlantic"} 10.0' in text
    assert 'pier_run_alive{run="atlantic"} 3.0' in text
    site = f'{{node="{node(LABS[1].name)}",run="atlantic",site="lab-b"}}'
    assert f"pier_site_round{site} 10.0" in text
    assert f"pier_site_up{site} 1.0" in text
    assert all(f"# HELP {name} " in text for name in OURS if name.startswith(("pier_run_", "pier_site_")))


async def test_a_revoked_site_has_no_speed() -> None:
    made = board()
    made.apply(Fact(Played(rounds=10).end, "event", node(LABS[1].name), {"state": "revoked"}))
    site = f'{{node="{node(LABS[1].name)}",run="atlantic",site="lab-b"}}'
    assert f"pier_site_tokens_per_second{site} 0.0" in await scraped(made)


async def test_a_revoked_site_is_not_late() -> None:
    made, b = board(), node(LABS[1].name)
    made.pulse(b, {"round": 50}, alive=True)
    made.apply(Fact(Played(rounds=10).end, "event", b, {"state": "revoked"}))
    assert f'pier_site_lag{{node="{b}",run="atlantic",site="lab-b"}} 0.0' in await scraped(made)


async def test_what_is_not_known_is_nan_and_an_empty_board_is_no_error() -> None:
    text = await scraped(ReadModel())
    assert 'pier_run_loss{run=""} NaN' in text
    assert "pier_site_round{" not in text


async def test_a_name_cannot_break_the_format() -> None:
    made = board()
    made.apply(Fact(Played().start, "site", "x", {"name": 'a"} 1\npier_evil 1'}))
    text = await scraped(made)
    assert "\npier_evil" not in text
    assert 'site="a\\"} 1 pier_evil 1"' in text


def test_the_grafana_board_asks_only_for_metrics_that_exist() -> None:
    dashboard = json.loads((DOCKER / "grafana" / "pier.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    names = {name for expression in asked for name in re.findall(r"pier_\w+", expression)}
    assert len(asked) >= 10
    assert names <= OURS
    assert {"pier_run_round", "pier_site_up", "pier_round_seconds"} <= names


def test_the_grafana_board_fits_its_grid_and_names_its_source() -> None:
    dashboard = json.loads((DOCKER / "grafana" / "pier.json").read_text())
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)
    variables = {each["name"]: each["type"] for each in dashboard["templating"]["list"]}
    assert variables == {"DS_PROMETHEUS": "datasource", "run": "query", "site": "query"}


def test_prometheus_is_told_of_node_and_coordinator() -> None:
    text = (DOCKER / "prometheus.yml").read_text()
    assert "job_name: pier-coordinator" in text
    assert "job_name: pier-node" in text
    assert text.count("metrics_path: /metrics") == 2
