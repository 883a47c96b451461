"""A site that has joined its run, and its part in outer rounds: rounds of all sites, or of pairs."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from pier_node.base.tasks import Background
from pier_node.config.run import RunConfig
from pier_node.gossip.pair_commit import PairTools
from pier_node.gossip.pair_rounds import PairRounds
from pier_node.gossip.standing import Standing
from pier_node.outer.codec import codec
from pier_node.outer.mean import ONE_EACH, trimmed_mean, weighing, weighted_mean
from pier_node.outer.schedule import synced, total_rounds
from pier_node.outer.state import OuterState
from pier_node.pipeline.vote_state import ONE_RESULT
from pier_node.rounds.attempt import Tools
from pier_node.rounds.catch_up import shadow_fetcher
from pier_node.rounds.folder import SiteRecord
from pier_node.rounds.means import Means
from pier_node.rounds.member import Rounds
from pier_node.rounds.progress import Progress
from pier_node.rounds.proofs import PROOFS_FILE, Proofs, Trust, Trusted
from pier_node.rounds.roster import Roster
from pier_node.rounds.statements import Statements
from pier_node.site.journal import Journal, PairJournal
from pier_node.site.loop import Orders
from pier_node.site.report import Reporter
from pier_node.site.settings import Settings
from pier_node.site.shutdown import Leave
from pier_node.trainer.data.corpus import SiteData
from pier_node.wire.carrier import Carrier
from pier_proto.v1.peer_pb2 import DoubleVote, Phase

if TYPE_CHECKING:
    from pier_node.site.coordinator.client import Coordination

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Joined:
    """A site that has joined its run: what its rounds and its training are built from.

    Attributes:
        settings: its folder has the journal, among other things.
        record: the site's record at the time when it joined.
        convict: removes the node that a double vote convicts.
        background: tasks of the site; an error in one of them ends the site.
        coordination: None: the run has no coordinator.
        say: prints a message for the user.
    """

    config: RunConfig
    settings: Settings
    carrier: Carrier
    roster: Roster
    statements: Statements
    proofs: Proofs
    reporter: Reporter
    record: SiteRecord = field(default_factory=lambda: SiteRecord(founder=True, slot=0))
    convict: Callable[[DoubleVote], None] = lambda _: None
    background: Background = field(default_factory=Background)
    coordination: Coordination | None = None
    say: Callable[[str], None] = print

    @cached_property
    def orders(self) -> Orders:
        """The operator's orders; without a coordinator there are none."""
        return self.coordination.orders if self.coordination else Orders()

    @property
    def progress(self) -> Progress:
        """The site's progress, which others and people are told."""
        return self.reporter.progress

    @property
    def data(self) -> SiteData:
        """The site's part of the training data."""
        return SiteData.of(self.config, self.record.slot, self.settings.data, self.settings.shared_data)

    @cached_property
    def standing(self) -> Standing:
        """The standing of the sites, in a run of pairs."""
        return Standing(self.roster, self.record.founded_by, self.statements)

    def first_trust(self) -> Trust | None:
        """What this site trusts before it has a state: the one with the fingerprint given, or else the run's founder.

        Returns None, with a warning, if it was told neither. Raises PierError.
        """
        if self.settings.trust:
            return Trust.of_fingerprint(self.settings.trust, self.statements)
        if self.record.founded_by:
            return Trust(Trusted(-1, b"", (self.record.founded_by,)), self.statements)
        log.warning(
            "the token does not name the run's founder: this site takes the first state that it is given; "
            "--trust with the fingerprint that `pier-node status` shows elsewhere would tell it which are genuine"
        )
        return None

    def joins_others(self) -> None:
        """Say that this site begins with what others have. It did not found the run, and has no state yet."""
        if self.settings.weights:
            log.warning("another site has founded this run: the weights in %s are not used", self.settings.weights)
        self.progress.phase = Phase.PHASE_CATCHING_UP

    def committed(self, state: OuterState, lines: Mapping[str, float] | None = None) -> Callable[[], None]:
        """A round is decided: the roster keeps its members. What is returned tells the coordinator, once it is kept.

        Args:
            lines: bandwidth to other sites in bytes per second, by node; None: not measured.
        """
        self.roster.keep(state.members)
        return self.coordination.recorder.round(state, lines) if self.coordination else lambda: None

    def measured(self, peer: str, bandwidth: float) -> None:
        """Tell the coordinator, if there is one, of the bandwidth to another site, in bytes per second."""
        if self.coordination:
            self.coordination.recorder.link(peer, bandwidth)

    def leave_politely(self, stack: AsyncExitStack, rounds: Rounds | None) -> None:
        """When the stack is closed before the run is done, leave the run: see Leave."""
        leave = Leave(self.carrier, self.roster, rounds)

        async def end() -> None:
            if self.progress.phase != Phase.PHASE_DONE:
                self.progress.phase = Phase.PHASE_LEAVING
                await leave.leave()

        stack.push_async_callback(end)


Keep = Callable[[OuterState], Awaitable[None]]
"""Returns once a committed state would survive a power cut. Raises PierError."""


def rounds_of_all(site: Joined, keep: Keep, length: int, state: OuterState, means: Means | None = None) -> Rounds:
    """Rounds of all sites, with what binds this site; in a run of pairs, the rounds of the final merge.

    In a pipeline, rounds decide about iterations: they take `length` elements unchanged, of the sites that are ready
    with one result (pipeline/vote_state.py).
    """
    config, carrier = site.config, site.carrier
    piped = config.pipeline.stages > 1
    in_pairs = config.outer.algorithm == "noloco" and not piped
    alike = piped or in_pairs
    if state.round > site.proofs.newest and not in_pairs:  # a round's proof is on disk before its state is
        log.warning(
            "%s is damaged, it does not reach round %d: this site cannot prove to newcomers what was committed before "
            "its next round",
            *(site.settings.folder / PROOFS_FILE, state.round),
        )
    one_each = ONE_RESULT if piped else ONE_EACH
    tools = Tools(
        carrier=carrier,
        roster=site.roster,
        statements=site.statements,
        journal=Journal(site.settings.folder / "journal.json"),
        proofs=site.proofs,
        keep=keep,
        means=means,
        fetch_shadow=shadow_fetcher(carrier, length),
        faults=site.settings.faults,
        codec=codec("none" if alike else config.outer.codec, config.outer.density),
        mean=trimmed_mean if config.outer.robust == "trimmed" and not piped else weighted_mean,
        weighing=(lambda _: one_each) if alike else partial(weighing, config),
        convict=site.convict,
        ask_witness=site.coordination.client.ask_witness if site.coordination and config.run.witness else None,
    )
    return Rounds(tools, state, lambda number: length if piped else synced(config, number, length))


def pairs_of_two(site: Joined, state: OuterState) -> PairRounds:
    """The rounds of pairs, with the pairs that this site has stored."""
    config = site.config
    tools = PairTools(
        carrier=site.carrier,
        roster=site.roster,
        standing=site.standing,
        journal=PairJournal(site.settings.folder / "pairs.json"),
        rates=config.outer.noloco,
        codec=codec(config.outer.codec),
        faults=site.settings.faults,
        weighing=partial(weighing, config),
    )
    return PairRounds(tools, config.run.seed, total_rounds(config), state)
