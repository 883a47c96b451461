"""A site and its coordinator, which comes and goes: in virtual time, the connection played."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from io import BufferedReader, BytesIO
from typing import Any

import pytest
from simulation.virtual_time import run

from pier_node.base.errors import PierError
from pier_node.experts.resume import Kept
from pier_node.rounds.revocations import Revoked
from pier_node.site.coordinator.client import CoordinatorClient
from pier_node.site.coordinator.link import NoLease, Refused, Unreachable
from pier_node.site.coordinator.records import Reports
from pier_node.site.loop import Orders
from pier_node.wire.files import PIECE
from pier_proto.v1.coordinator_pb2 import (
    ArrivedReply,
    ArrivedRequest,
    Assignment,
    CheckpointPart,
    DeliverReply,
    DeliverRequest,
    FetchCheckpointRequest,
    GiveCheckpointReply,
    HeartbeatReply,
    HeartbeatRequest,
    Note,
    Order,
    Paths,
    Record,
    RegisterReply,
    RegisterRequest,
    ReportReply,
    ReportRequest,
    ScoreSheet,
    Stage,
    WatchRequest,
)
from pier_proto.v1.peer_pb2 import Pulse, Revocations, Site

PAUSE, TRAIN, STOP = Order.ACTIVITY_PAUSE, Order.ACTIVITY_TRAIN, Order.ACTIVITY_STOP


class Played:
    """A coordinator: `problem` is what every call meets, if there is one."""

    def __init__(self) -> None:
        self.problem: Exception | None = None
        self.asked: list[str] = []
        self.stored: list[str] = []
        self.unwanted = "?"
        self.leases = 0
        self.delivered: list[list[DeliverRequest]] = []
        self.checkpoint: list[CheckpointPart] = []
        self.has: dict[str, int] | None = {}
        self.damaged = 0
        self.revoked = Revocations()
        self.paths: list[int] = []
        self.orders: asyncio.Queue[Order] = asyncio.Queue()

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.problem:
            raise self.problem

    async def register(self, request: RegisterRequest, timeout: float) -> RegisterReply:
        self._ask("register")
        self.leases += 1
        order = Order(epoch=1, activity=TRAIN)
        roster = [Site(node=f"site {self.leases}")]
        return RegisterReply(lease=b"%d" % self.leases, heartbeat_seconds=1.0, order=order, roster=roster)

    async def heartbeat(self, request: HeartbeatRequest, timeout: float) -> HeartbeatReply:
        self._ask("heartbeat")
        if request.lease != b"%d" % self.leases:
            raise NoLease("no such lease")
        if request.HasField("paths"):
            self.paths.append(request.paths.round)
        return HeartbeatReply(order=1, revocations=self.revoked)

    async def report(self, request: ReportRequest, timeout: float) -> ReportReply:
        self._ask("report")
        if any(record.note.text == self.unwanted for record in request.records):
            raise Refused("Record.note.text is not allowed")
        self.stored += [record.note.text for record in request.records]
        return ReportReply(stored=request.first + len(request.records))

    async def arrived(self, request: ArrivedRequest, timeout: float) -> ArrivedReply:
        self._ask("arrived")
        if self.has is None:
            raise Refused("no such method")
        return ArrivedReply(offset=self.has.pop(request.digest.hex(), 0))

    async def deliver(self, pieces: AsyncIterator[DeliverRequest], timeout: float) -> DeliverReply:
        self._ask("deliver")
        self.delivered.append([piece async for piece in pieces])
        if self.damaged:
            self.damaged -= 1
            raise Refused("its hash is not that of the bytes that came")
        return DeliverReply()

    async def give_checkpoint(self, parts: AsyncIterator[CheckpointPart], timeout: float) -> GiveCheckpointReply:
        self._ask("give")
        self.checkpoint = [part async for part in parts]
        return GiveCheckpointReply()

    async def fetch_checkpoint(self, request: FetchCheckpointRequest, timeout: float) -> AsyncGenerator[CheckpointPart]:
        self._ask(f"fetch {request.plan} {request.job} {request.lease.decode()}")
        for part in self.checkpoint:
            yield part

    async def watch(self, request: WatchRequest) -> AsyncGenerator[Order]:
        self._ask("watch")
        while True:
            yield await self.orders.get()

    async def close(self) -> None:
        self._ask("close")


class Barred(Revoked):
    """Takes every list."""

    version = 0

    def __init__(self) -> None:
        self.nodes = set[str]()

    def take(self, told: Revocations) -> None:
        if told.version:
            self.version, self.nodes = told.version, {*told.nodes}


class Here:
    """A client, and what came of it."""

    def __init__(self) -> None:
        self.coordinator, self.orders, self.reports = Played(), Orders(), Reports()
        self.stopped, self.barred, self.met = 0, Barred(), list[str]()
        self.planned: Paths | None = None
        link: Any = self.coordinator
        here: Any = self
        self.client = CoordinatorClient(link, here, self.orders, self.reports, self.barred)

    def registration(self) -> RegisterRequest:
        return RegisterRequest()

    def pulse(self) -> Pulse:
        return Pulse()

    def paths(self) -> Paths | None:
        return self.planned

    def meet(self, sites: Iterable[Site]) -> None:
        self.met += [site.node for site in sites]

    def stop(self) -> None:
        self.stopped += 1


def meanwhile(story: Callable[[Here], Coroutine[Any, Any, None]]) -> Here:
    """Let a site keep in touch while something happens."""

    async def play() -> Here:
        site = Here()
        work = asyncio.create_task(site.client.run())
        await story(site)
        work.cancel()
        await asyncio.wait([work])
        return site

    return run(play())


def test_a_site_says_that_it_is_here_and_takes_orders() -> None:
    async def story(site: Here) -> None:
        await asyncio.sleep(3.5)
        await site.coordinator.orders.put(Order(epoch=2, activity=PAUSE))
        await asyncio.sleep(0.1)
        assert site.orders.paused
        await site.coordinator.orders.put(Order(epoch=3, activity=TRAIN, assignment=Assignment(stage=Stage(number=2))))
        site.coordinator.revoked = Revocations(version=7, nodes=["mallory"])
        await asyncio.sleep(2.0)

    site = meanwhile(story)
    assert site.coordinator.asked.count("heartbeat") >= 5
    assert (site.orders.epoch, site.orders.paused, site.stopped) == (3, False, 0)
    assert site.orders.stage == 2
    assert (site.barred.version, site.barred.nodes) == (7, {"mallory"})


def test_paths_are_told_once_and_again_to_a_coordinator_that_was_away() -> None:
    async def story(site: Here) -> None:
        await asyncio.sleep(2.0)
        site.planned = Paths(round=3, content=b"three")
        await asyncio.sleep(5.0)
        assert site.coordinator.paths == [3]
        site.planned = Paths(round=4, content=b"four")
        await asyncio.sleep(5.0)
        site.coordinator.problem = Unreachable("connection refused")
        await asyncio.sleep(5.0)
        site.coordinator.problem = None
        await asyncio.sleep(30.0)
        site.coordinator.leases += 5
        await asyncio.sleep(30.0)

    assert meanwhile(story).coordinator.paths == [3, 4, 4, 4]


def test_an_order_to_stop_is_followed() -> None:
    async def story(site: Here) -> None:
        await asyncio.sleep(0.5)
        await site.coordinator.orders.put(Order(epoch=2, activity=STOP))
        await asyncio.sleep(0.5)

    assert meanwhile(story).stopped == 1


def test_what_there_is_to_tell_waits_for_a_coordinator_that_is_away() -> None:
    async def story(site: Here) -> None:
        await asyncio.sleep(2.0)
        site.coordinator.problem = Unreachable("connection refused")
        for number in range(3):
            site.reports.add(Record(note=Note(text=str(number))))
        await asyncio.sleep(600.0)
        before = len(site.coordinator.asked)
        assert before < 60, "it asks less and less often"
        site.coordinator.problem = None
        await asyncio.sleep(60.0)

    site = meanwhile(story)
    assert site.coordinator.stored == ["0", "1", "2"]
    assert site.coordinator.asked.count("register") == 1, "the lease holds"


def test_a_coordinator_that_has_forgotten_the_lease_gets_another_registration() -> None:
    async def story(site: Here) -> None:
        await asyncio.sleep(2.0)
        site.coordinator.leases += 5
        await asyncio.sleep(5.0)
        assert site.coordinator.asked[-1] == "heartbeat"

    site = meanwhile(story)
    assert site.coordinator.asked.count("register") == 2
    assert site.met == ["site 1", "site 7"], "others may have come meanwhile"


def test_a_site_that_is_not_wanted_any_more_ends_with_the_reason() -> None:
    async def story() -> None:
        site = Here()
        work = asyncio.create_task(site.client.run())
        await asyncio.sleep(2.0)
        site.coordinator.problem = Refused("this site was revoked")
        await asyncio.wait([work])
        with pytest.raises(PierError, match="this site was revoked"):
            work.result()

    run(story())


def test_a_report_that_is_not_wanted_is_left_out_and_the_site_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def story(site: Here) -> None:
        site.reports.add(Record(note=Note(text="?")))
        await asyncio.sleep(5.0)
        site.reports.add(Record(note=Note(text="later")))
        await asyncio.sleep(5.0)
        assert site.coordinator.asked[-1] == "heartbeat"

    assert meanwhile(story).coordinator.stored == ["later"]
    assert "the coordinator does not take 1 records of this site: Record.note.text is not allowed" in caplog.messages


def test_a_start_does_not_wait_for_a_coordinator_for_ever() -> None:
    async def story() -> None:
        site = Here()
        site.coordinator.problem = Unreachable("connection refused")
        assert await site.client.enter(10.0) is None
        site.coordinator.problem = None
        reply = await site.client.enter(10.0)
        assert reply is not None
        assert reply.lease == b"1"

    run(story())


def test_the_last_word_is_sent_at_the_end() -> None:
    async def story(site: Here) -> None:
        await asyncio.sleep(0.5)
        site.reports.add(Record(note=Note(text="goodbye")))
        await site.client.close()
        assert site.coordinator.asked[-3:] == ["report", "heartbeat", "close"]

    assert meanwhile(story).coordinator.stored == ["goodbye"]


def test_a_coordinator_that_came_back_unnoticed_hears_the_end_too() -> None:
    async def story(site: Here) -> None:
        site.coordinator.problem = Unreachable("nobody is there")
        await asyncio.sleep(100)
        site.reports.add(Record(note=Note(text="goodbye")))
        site.coordinator.problem = None
        site.coordinator.asked.clear()
        await site.client.close()
        assert site.coordinator.asked == ["register", "report", "heartbeat", "close"]

    assert meanwhile(story).coordinator.stored == ["goodbye"]


def test_a_score_sheet_is_sent_in_pieces_and_waits_for_a_coordinator_that_is_away() -> None:
    content = bytes(range(256)) * (PIECE // 256) + b"end"

    async def story(site: Here) -> None:
        await asyncio.sleep(1.0)
        site.coordinator.problem = Unreachable("gone")
        sending = asyncio.create_task(site.client.deliver(ScoreSheet(expert="e"), content))
        await asyncio.sleep(100.0)
        assert not sending.done()
        site.coordinator.problem = None
        await sending

    (pieces,) = meanwhile(story).coordinator.delivered
    assert b"".join(piece.piece for piece in pieces) == content
    assert (pieces[0].size, pieces[0].sheet.expert) == (len(content), "e")
    assert pieces[0].digest == hashlib.sha256(content).digest()
    assert pieces[1:] == [DeliverRequest(piece=content[:PIECE]), DeliverRequest(piece=b"end")]


CONTENT = bytes(range(256)) * (3 * PIECE // 256) + b"end"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def sheets_of(played: Played) -> list[tuple[int, bytes]]:
    """Offset and content of each transfer of a sheet."""
    return [(pieces[0].offset, b"".join(piece.piece for piece in pieces)) for pieces in played.delivered]


@pytest.mark.parametrize("has", [None, {}, {"0f" * 32: 100}, {DIGEST: len(CONTENT) + 1}])
def test_a_score_sheet_is_sent_whole_if_the_coordinator_has_nothing_of_it_or_is_of_an_earlier_version(
    has: dict[str, int] | None,
) -> None:
    async def story(site: Here) -> None:
        await asyncio.sleep(1.0)
        site.coordinator.has = has
        await site.client.deliver(ScoreSheet(), CONTENT)

    assert sheets_of(meanwhile(story).coordinator) == [(0, CONTENT)]


def test_a_score_sheet_goes_on_where_it_was_interrupted() -> None:
    async def story(site: Here) -> None:
        await asyncio.sleep(1.0)
        site.coordinator.has = {DIGEST: PIECE + 5}
        await site.client.deliver(ScoreSheet(), CONTENT)

    assert sheets_of(meanwhile(story).coordinator) == [(PIECE + 5, CONTENT[PIECE + 5 :])]


def test_a_score_sheet_of_which_the_coordinator_had_something_else_is_sent_again() -> None:
    async def story(site: Here) -> None:
        await asyncio.sleep(1.0)
        site.coordinator.has, site.coordinator.damaged = {DIGEST: PIECE}, 1
        await site.client.deliver(ScoreSheet(), CONTENT)

    assert sheets_of(meanwhile(story).coordinator) == [(PIECE, CONTENT[PIECE:]), (0, CONTENT)]


def test_a_checkpoint_goes_on_where_it_was_interrupted() -> None:
    kept = Kept(job=3, step=40, size=len(CONTENT), digest=DIGEST)

    async def story(site: Here) -> None:
        await asyncio.sleep(1.0)
        site.coordinator.has = {DIGEST: 2 * PIECE}
        await site.client.give_checkpoint("plan", kept, BufferedReader(BytesIO(CONTENT)))

    first, *rest = meanwhile(story).coordinator.checkpoint
    assert (first.offset, first.checkpoint.digest) == (2 * PIECE, DIGEST)
    assert b"".join(part.piece for part in rest) == CONTENT[2 * PIECE :]


def test_a_score_sheet_that_nobody_wants_is_not_sent_again() -> None:
    async def story(site: Here) -> None:
        await asyncio.sleep(1.0)
        site.coordinator.problem = Refused("no such evaluation is under way")
        with pytest.raises(Refused):
            await site.client.deliver(ScoreSheet(), b"")
        site.coordinator.problem = None

    assert meanwhile(story).coordinator.delivered == []


def test_a_checkpoint_is_given_in_pieces_and_fetched_again() -> None:
    content = bytes(range(256)) * (PIECE // 256) + b"end"
    kept = Kept(job=3, step=40, size=len(content), digest="0f" * 32)

    async def story(site: Here) -> None:
        await asyncio.sleep(1.0)
        await site.client.give_checkpoint("plan", kept, BufferedReader(BytesIO(content)))
        found = [part async for part in site.client.fetch_checkpoint("plan", kept)]
        assert b"".join(part.piece for part in found) == content

    played = meanwhile(story).coordinator
    first, *rest = played.checkpoint
    assert (first.lease, first.plan, first.piece) == (b"1", "plan", b"")
    assert (first.checkpoint.job, first.checkpoint.step, first.checkpoint.size) == (3, 40, len(content))
    assert [len(part.piece) for part in rest] == [PIECE, 3]
    assert "fetch plan 3 1" in played.asked


def test_a_checkpoint_does_not_wait_for_a_coordinator_that_is_away() -> None:
    kept = Kept(job=3, step=40, size=3, digest="0f" * 32)

    async def story() -> None:
        site = Here()
        with pytest.raises(Unreachable, match="away"):
            await site.client.give_checkpoint("plan", kept, BufferedReader(BytesIO(b"abc")))
        with pytest.raises(Unreachable, match="away"):
            await anext(site.client.fetch_checkpoint("plan", kept))

    run(story())
