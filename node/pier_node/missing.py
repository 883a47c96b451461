"""Tells people which sites have to be started before this one can go on: it cannot do that itself."""

from __future__ import annotations

import asyncio
import logging

from pier.v1.peer_pb2 import Phase
from pier_node.outer.quorum import has_quorum
from pier_node.outer.round import Rounds
from pier_node.report import Reporter
from pier_node.roster import Roster

PATIENCE = 15.0
"""Seconds for which sites must have been silent: who is only restarting is not worth a word."""
LOOK = 1.0

log = logging.getLogger(__name__)


async def tell_of_missing(reporter: Reporter, roster: Roster) -> None:
    """Say it, once for the same sites, in the log and in `reporter.missing`. Runs until it is cancelled."""
    now = asyncio.get_running_loop().time
    found: frozenset[str] = frozenset()
    since = now()
    while True:
        seen = _missing(reporter, roster)
        if seen != found:
            found, since, reporter.missing = seen, now(), ""
        if found and not reporter.missing and now() - since >= PATIENCE:
            reporter.missing = _said(sorted(map(roster.called, found)))
            log.warning("%s", reporter.missing)
        await asyncio.sleep(LOOK)


def _missing(reporter: Reporter, roster: Roster) -> frozenset[str]:
    """The silent sites without whom this one waits for ever."""
    waits = reporter.progress.phase in (Phase.PHASE_WAITING, Phase.PHASE_CATCHING_UP)
    if not waits:
        return frozenset()
    if reporter.rounds is None:  # it has no state yet: any one of them has it
        anybody = any(map(roster.alive, roster.contacts))
        return frozenset() if anybody else frozenset(site.node for site in roster.known())
    if not isinstance(reporter.rounds, Rounds):  # pairs: who finds no partner goes on alone
        return frozenset()
    members, convicted = reporter.rounds.state.members, reporter.rounds.statements.convicted
    here = {node for node in members if roster.alive(node)}
    return frozenset() if has_quorum(here, members, convicted) else frozenset(members) - here - convicted


def _said(names: list[str]) -> str:
    alone = len(names) == 1
    who = "It" if alone else "They"
    return (
        f"{', '.join(names)} {'does' if alone else 'do'} not answer, and this site cannot go on without "
        f"{'it' if alone else 'them'}. {who} may have been stopped, or may have finished the run and ended: "
        "start `pier-node start --data FOLDER` there again. A site that has finished hands its model over."
    )
