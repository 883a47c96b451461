"""A site's part in outer rounds, as its run and its disk say: Rounds of all, or Pairs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pier.v1.peer_pb2 import Ballot
from pier_node.config import RunConfig
from pier_node.faults import Faults
from pier_node.journal import Journal, PairJournal
from pier_node.outer.attempt import Tools
from pier_node.outer.codec import codec
from pier_node.outer.deal import PairTools
from pier_node.outer.mean import trimmed_mean, weighted_mean
from pier_node.outer.pairing import PairRun
from pier_node.outer.pairs import Pairs
from pier_node.outer.promises import Voted
from pier_node.outer.round import Rounds
from pier_node.outer.schedule import synced, total_rounds
from pier_node.outer.state import OuterState
from pier_node.outer.weights import ONE_EACH, weighing
from pier_node.roster import Roster
from pier_node.wire.carrier import Carrier
from pier_node.wire.transfer import SILENCE, shadow_fetcher


def rounds_of_all(
    config: RunConfig, carrier: Carrier, roster: Roster, folder: Path, length: int, state: OuterState, faults: Faults
) -> Rounds:
    """With what this site has promised and voted; its journal is in `folder`. In a run of pairs, for their merge.

    In a pipeline rounds decide about iterations: they take `length` elements as they are (pipeline/tally.py).
    """
    journal = Journal(folder / "journal.json")
    vote, voted = journal.last(), None
    if vote and vote.round > state.round:
        ballot = Ballot(number=vote.ballot_number, keeper=vote.ballot_keeper)
        voted = Voted(vote.round, ballot, vote.value, None)
    fetch = shadow_fetcher(carrier, length, SILENCE)
    piped = config.pipeline.stages > 1
    alike = piped or config.outer.algorithm == "noloco"
    codec_name = "none" if alike else config.outer.codec
    mean = trimmed_mean if config.outer.robust == "trimmed" and not piped else weighted_mean
    weighs = (lambda _: ONE_EACH) if alike else partial(weighing, config)
    tools = Tools(carrier, roster, journal, fetch, faults, codec(codec_name), mean=mean, weighing=weighs)
    return Rounds(tools, state, voted, lambda number: length if piped else synced(config, number, length))


def pairs_of_two(
    config: RunConfig, carrier: Carrier, roster: Roster, folder: Path, state: OuterState, faults: Faults
) -> Pairs:
    """With what this site remembers of its pairs; its journal is in `folder`."""
    journal, outer = PairJournal(folder / "pairs.json"), config.outer
    tools = PairTools(carrier, roster, journal, outer.noloco, codec(outer.codec), faults)
    return Pairs(tools, PairRun(config.run.seed, total_rounds(config)), state)
