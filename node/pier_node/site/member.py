"""Builds a site's part in outer rounds from its run and its disk: Rounds of all sites, or Pairs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pier_node.base.faults import NO_FAULTS, Faults
from pier_node.config.run import RunConfig
from pier_node.gossip.pair_commit import PairTools
from pier_node.gossip.pairs import Pairs
from pier_node.outer.codec import codec
from pier_node.outer.mean import trimmed_mean, weighted_mean
from pier_node.outer.noloco import PairRun
from pier_node.outer.schedule import synced, total_rounds
from pier_node.outer.state import OuterState
from pier_node.outer.weights import ONE_EACH, weighing
from pier_node.rounds.attempt import Tools
from pier_node.rounds.catch_up import shadow_fetcher
from pier_node.rounds.member import Rounds
from pier_node.rounds.proofs import Proofs
from pier_node.rounds.roster import Roster
from pier_node.rounds.statements import Statements
from pier_node.site.journal import Journal, PairJournal
from pier_node.wire.carrier import Carrier
from pier_proto.v1.peer_pb2 import DoubleVote


@dataclass(frozen=True)
class Footing:
    """What a site's rounds are built from. Its journal is in `folder`.

    Attributes:
        convict: removes the node that a double vote convicts.
    """

    config: RunConfig
    carrier: Carrier
    roster: Roster
    statements: Statements
    folder: Path
    proofs: Proofs
    convict: Callable[[DoubleVote], None] = lambda _: None
    faults: Faults = NO_FAULTS


Keep = Callable[[OuterState], Awaitable[None]]
"""Returns once a committed state would survive a power cut. Raises PierError."""


def rounds_of_all(site: Footing, keep: Keep, length: int, state: OuterState) -> Rounds:
    """Rounds of all sites, with what binds this site; in a run of pairs, the rounds of the final merge.

    In a pipeline, rounds decide about iterations: they take `length` elements unchanged (pipeline/vote_state.py).
    """
    config, carrier = site.config, site.carrier
    fetch = shadow_fetcher(carrier, length)
    piped = config.pipeline.stages > 1
    alike = piped or config.outer.algorithm == "noloco"
    codec_name = "none" if alike else config.outer.codec
    mean = trimmed_mean if config.outer.robust == "trimmed" and not piped else weighted_mean
    journal = Journal(site.folder / "journal.json")
    weighs = (lambda _: ONE_EACH) if alike else partial(weighing, config)
    disk = journal, site.proofs, keep
    tools = Tools(carrier, site.roster, site.statements, *disk, fetch, site.faults, convict=site.convict)
    tools.codec, tools.mean, tools.weighing = codec(codec_name), mean, weighs
    return Rounds(tools, state, lambda number: length if piped else synced(config, number, length))


def pairs_of_two(site: Footing, state: OuterState) -> Pairs:
    """Pairs, with the pairs that this site has stored."""
    journal, outer = PairJournal(site.folder / "pairs.json"), site.config.outer
    tools = PairTools(site.carrier, site.roster, journal, outer.noloco, codec(outer.codec), site.faults)
    tools.weighing = partial(weighing, site.config)
    return Pairs(tools, PairRun(site.config.run.seed, total_rounds(site.config)), state)
