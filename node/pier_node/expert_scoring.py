"""A site scores its experts where they lie: only log-probabilities travel to the coordinator, as score sheets."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

from pier.v1.coordinator_pb2 import ScoreSheet
from pier_node.coordination.link import Refused
from pier_node.errors import PierError
from pier_node.experts.scoring_order import ScoringOrder
from pier_node.experts.scoring_process import Said, scored

PROBLEM = 2000
"""Most letters of why something cannot be scored."""

Deliver = Callable[[ScoreSheet, bytes], Awaitable[None]]
"""Returns when the coordinator has it. Raises Refused: it does not want it."""

log = logging.getLogger(__name__)


class ExpertScoring:
    """Scores whatever is ordered, each expert once for each order.

    Args:
        folder: the site's; its experts are in `experts`, and sheets on their way in `scores`.
    """

    def __init__(self, folder: Path, deliver: Deliver) -> None:
        self._folder, self._deliver = folder, deliver
        self._over: set[tuple[str, str]] = set()

    def due(self, order: ScoringOrder | None) -> ScoringOrder | None:
        """What of an order is to be done yet; None: nothing."""
        if order is None:
            return None
        names = tuple(name for name in order.experts if (order.id, name) not in self._over)
        return order.model_copy(update={"experts": names}) if names else None

    async def run(self, order: ScoringOrder) -> None:
        """Score, and send what comes out; what cannot be scored is told."""
        out = self._folder / "scores"
        log.info("scoring %d experts on the text of %d domains", len(order.experts), len(order.domains))
        try:
            async with aclosing(scored(order, self._folder / "experts", out)) as lines:
                async for said in lines:
                    await self._tell(order.id, said)
        except (PierError, OSError) as error:
            log.error("experts cannot be scored here: %s", error)
            for name in order.experts:
                problem = error.problem if isinstance(error, PierError) else str(error)
                await self._tell(order.id, Said(name, problem=problem))
        finally:
            await asyncio.to_thread(shutil.rmtree, out, ignore_errors=True)
        self._over |= {(order.id, name) for name in order.experts}

    async def _tell(self, scoring: str, said: Said) -> None:
        about = ScoreSheet(scoring=scoring, expert=said.expert, domain=said.domain, problem=said.problem[:PROBLEM])
        content = await asyncio.to_thread(Path(said.sheet).read_bytes) if said.sheet else b""
        try:
            await self._deliver(about, content)
        except Refused as refused:
            log.warning("the coordinator does not want what is scored: %s", refused)
