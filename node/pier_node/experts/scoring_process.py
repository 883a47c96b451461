"""Scores on order in a separate process: `python -m pier_node.experts.scoring_process ORDER FOLDER OUT`.

ORDER is a file with a ScoringOrder, FOLDER contains the experts by name, and OUT receives the sheets. The process
prints a line of JSON for each sheet and for everything that cannot be scored. Meanwhile the site's daemon stays
responsive, and the process ends with the daemon.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pier_node.base.errors import PierError
from pier_node.base.processes import die_with_parent
from pier_node.experts.sheet import ScoringOrder


@dataclass(frozen=True)
class Said:
    """A line of the process's output.

    Attributes:
        expert: name of the expert.
        domain: name of the domain; "": all domains.
        sheet: path of the sheet; "": there is none, and `problem` says why.
    """

    expert: str
    domain: str = ""
    sheet: str = ""
    problem: str = ""


async def scored(order: ScoringOrder, folder: Path, out: Path) -> AsyncGenerator[Said]:
    """Score in another process, which ends when this generator is closed. Raises PierError: it failed."""
    file = await asyncio.to_thread(_written, order, out)
    words = (sys.executable, "-m", __name__, str(file), str(folder), str(out))
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl+C in the daemon's terminal must not reach it
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            yield Said(**json.loads(line))
        if await process.wait():
            raise PierError(f"scoring ended with exit code {process.returncode}", "The lines above say why.")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def said(order: ScoringOrder, folder: Path, out: Path) -> Iterator[Said]:
    """Score; the sheets are written to `out`."""
    from pier_node.experts.scoring import Parents, Texts, expert_in, sheets_of, texts_of
    from pier_node.rounds.weights import pick_device
    from pier_node.trainer.model.export import read_config

    places: dict[str, tuple[str, Path]] = {}
    for name in order.experts:
        try:
            places[name] = expert_in(folder / name)
        except PierError as error:
            yield Said(name, problem=error.problem)
    context = min((read_config(place).context for _, place in places.values()), default=0)
    texts: Texts = {}
    for wanted in order.domains:
        try:
            texts = {**texts, **texts_of([wanted.section], context, order.rows, wanted.digest)}
        except PierError as error:
            yield from (Said(name, wanted.section.name, problem=error.problem) for name in places)
    device = pick_device("")
    parents = Parents(texts, device)
    for name, (domain, place) in places.items():
        try:
            for sheet in sheets_of(domain, place, texts, device, parents):
                yield Said(name, sheet.subject.domain, str(sheet.save(out)))
        except PierError as error:
            yield Said(name, problem=error.problem)


def _written(order: ScoringOrder, out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    file = out / "order.json"
    file.write_text(order.model_dump_json())
    return file


def main() -> None:
    """Print the results for `scored`."""
    die_with_parent()
    order, folder, out = map(Path, sys.argv[1:])
    for each in said(ScoringOrder.model_validate_json(order.read_text()), folder, out):
        print(json.dumps(asdict(each)), flush=True)


if __name__ == "__main__":
    main()
