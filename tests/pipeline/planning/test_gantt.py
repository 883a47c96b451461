"""The chart of a schedule."""

from __future__ import annotations

from xml.etree import ElementTree

from pipeline.planning.cases import problem

from pier_node.pipeline.planning.gantt import colour, gantt_svg
from pier_node.pipeline.planning.plan import random_plan
from pier_node.pipeline.planning.simulator import simulate

IT = problem(link_s=2.0)
PLAN = random_plan(IT, 1)
SCHEDULE = simulate(IT, PLAN)
SPACE = "{http://www.w3.org/2000/svg}"


def test_colours_are_told_apart() -> None:
    assert len({colour(number) for number in range(200)}) == 200
    assert colour(3) != colour(3, darker=True)
    assert colour(0).startswith("#")


def test_svg_has_every_task_and_transfer() -> None:
    root = ElementTree.fromstring(gantt_svg(IT, PLAN, SCHEDULE, "a & b <c>"))
    boxes = [box for box in root.iter(f"{SPACE}rect") if box.find(f"{SPACE}title") is not None]
    assert len(boxes) == len(SCHEDULE.tasks) + len(SCHEDULE.transfers)
    texts = ["".join(text.itertext()) for text in root.iter(f"{SPACE}text")]
    assert "a & b <c>" in texts
    assert {f"{stage}  s{site}" for stage, sites in enumerate(PLAN.stages) for site in sites} <= {*texts}
    assert "0 s" in texts
    right = max(float(box.get("x", "")) + float(box.get("width", "")) for box in boxes)
    assert right <= 1200
