"""The store: what is kept, and when."""

from __future__ import annotations

import asyncio
import math
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import closing
from pathlib import Path

import pytest
from coordinator.cases import ALICE, BOB, CAROL, NOW, Ticket, note, open_store, registration
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_coordinator.store import sites
from pier_coordinator.store.facts import Fact
from pier_coordinator.store.sites import (
    REPLICA,
    STREAMS,
    Refused,
    Report,
    Standing,
    Stranger,
    add_invite,
    enrol,
    put_meta,
    register,
    revoke,
    revoke_invite,
    set_order,
    take_report,
)
from pier_coordinator.store.store import LOG_NAME, MIGRATIONS, Store, migrate
from pier_node.base.errors import PierError


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Store]:
    store = open_store(tmp_path)
    yield store
    await store.close()


async def let_in(store: Store, node: str, name: str = "", uses: int = 1) -> Standing:
    ticket = Ticket.make(f"for-{node}")
    await store.do(add_invite, ticket.row(uses=uses))
    return await store.do(enrol, node, name, ticket.id, NOW)


def of_kind(store: Store, kind: str) -> list[Fact]:
    return [fact for fact in store.facts() if fact.kind == kind]


def texts(store: Store, kind: str = "note") -> list[str]:
    return [fact.body["text"] for fact in store.facts() if fact.kind == kind]


# --- facts -----------------------------------------------------------------------------------------


async def test_facts_get_numbers_and_everybody_is_told_before_it_is_acknowledged(tmp_path: Path) -> None:
    told: list[Fact] = []
    store = open_store(tmp_path, told.extend)
    stored = await store.add_facts([note("a"), note("b")])
    assert [fact.number for fact in stored] == [1, 2]
    assert told == stored == list(store.facts())
    assert [Fact.parse(line) for line in (tmp_path / LOG_NAME).read_text().splitlines()] == stored
    await store.close()


async def test_what_is_asked_at_once_is_committed_together_in_order(store: Store) -> None:
    stored = await asyncio.gather(*(store.add_facts([note(str(number))]) for number in range(1000)))
    assert [fact.number for (fact,) in stored] == list(range(1, 1001))
    assert texts(store) == [str(number) for number in range(1000)]


async def test_the_write_ahead_log_is_short_again_when_the_database_was_tidied(store: Store, tmp_path: Path) -> None:
    log = tmp_path / "run.db-wal"
    for number in range(60):
        await store.add_facts([note(str(number) * 2000)])
    assert log.stat().st_size > 1_000_000
    writing = asyncio.create_task(store.add_facts([note("meanwhile")]))
    await store.tidy()
    await writing
    assert log.stat().st_size < 100_000
    assert len(texts(store)) == 61


async def test_an_operation_that_fails_takes_nothing_else_along(store: Store) -> None:
    bad = Fact(NOW, "sample", ALICE.node, {"loss": math.nan})
    outcomes = await asyncio.gather(
        store.add_facts([note("a")]),
        store.add_facts([note("x"), bad]),
        store.do(register, CAROL.node, registration(), NOW),
        store.add_facts([note("b")]),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [list, ValueError, Stranger, list]
    assert [(fact.number, fact.body["text"]) for fact in store.facts()] == [(1, "a"), (2, "b")]


async def test_facts_are_read_by_page_and_by_kind(store: Store) -> None:
    await store.add_facts([note(str(number)) for number in range(2500)])
    await store.add_facts([Fact(NOW, "event", "", {"level": 20, "text": "e"})])
    assert len(list(store.facts())) == 2501
    assert [fact.number for fact in store.facts(after=2499)] == [2500, 2501]
    assert [fact.number for fact in of_kind(store, "event")] == [2501]


async def test_all_is_there_again_after_a_restart(store: Store, tmp_path: Path) -> None:
    await let_in(store, ALICE.node, "lab-a")
    await store.do(register, ALICE.node, registration(), NOW)
    await store.do(put_meta, "key", "value")
    before = (store.sites(), store.invites(), store.orders(), list(store.facts()), store.meta("key"))
    await store.close()
    again = open_store(tmp_path)
    assert (again.sites(), again.invites(), again.orders(), list(again.facts()), again.meta("key")) == before
    (added,) = await again.add_facts([note("next")])
    assert added.number == before[3][-1].number + 1
    await again.close()


async def test_what_is_asked_before_the_end_is_done_and_nothing_after_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    last = asyncio.gather(*(store.add_facts([note(str(number))]) for number in range(100)))
    await asyncio.sleep(0)  # they are asked
    await store.close()
    assert len(await last) == 100
    with pytest.raises(sqlite3.ProgrammingError, match="was closed"):
        await store.add_facts([note("late")])


async def test_a_listener_that_fails_keeps_nobody_waiting(tmp_path: Path) -> None:
    def told(_: list[Fact]) -> None:
        raise RuntimeError("a listener's own trouble")

    failures: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(str(context["exception"])))
    store = open_store(tmp_path, told)
    assert (await store.add_facts([note("a")]))[0].number == 1
    assert failures == ["a listener's own trouble"]
    await store.close()


async def test_two_coordinators_cannot_have_one_database(store: Store, tmp_path: Path) -> None:
    with pytest.raises(PierError, match="a coordinator is running with it"):
        open_store(tmp_path)


@pytest.mark.parametrize("left", [None, b""])
async def test_an_empty_database_is_not_taken_for_that_of_a_run_that_has_begun(
    tmp_path: Path, left: bytes | None
) -> None:
    """It would turn every site of the run away."""
    store = open_store(tmp_path)
    await let_in(store, ALICE.node)
    await store.close()
    (tmp_path / "run.db").unlink()
    if left is not None:
        (tmp_path / "run.db").write_bytes(left)
    with pytest.raises(PierError, match=r"empty or gone.*\nRestore it from a backup"):
        open_store(tmp_path)


async def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.db").write_bytes(b"no database " * 1000)
    with pytest.raises(PierError, match=r"run\.db: file is not a database"):
        open_store(tmp_path)
    with pytest.raises(PierError, match="No such file or directory"):
        open_store(tmp_path / "missing")


async def test_a_full_database_refuses_and_goes_on_when_there_is_room(store: Store) -> None:
    await store.add_facts([note("before")])
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        await store.add_facts([note("x" * 2000) for _ in range(100)])
    store._connection.execute("PRAGMA max_page_count = 1000000")
    (added,) = await store.add_facts([note("after")])
    assert added.number == 2
    assert texts(store) == ["before", "after"]


async def test_a_database_that_somebody_else_locks_refuses(store: Store, tmp_path: Path) -> None:
    store._connection.execute("PRAGMA busy_timeout = 0")
    with closing(sqlite3.connect(tmp_path / "run.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            await store.add_facts([note("a")])
        other.execute("ROLLBACK")
    assert (await store.add_facts([note("b")]))[0].number == 1


# --- sites -----------------------------------------------------------------------------------------


async def test_an_invite_counts_sites_not_attempts(store: Store) -> None:
    ticket = Ticket.make()
    await store.do(add_invite, ticket.row(uses=2))
    for node in (ALICE.node, ALICE.node, BOB.node, ALICE.node):
        await store.do(enrol, node, f"lab-{node}", ticket.id, NOW)
    assert store.invites()[0].uses_left == 0
    with pytest.raises(Refused, match="this invite was used already"):
        await store.do(enrol, CAROL.node, "lab-c", ticket.id, NOW)
    assert [site.node for site in store.sites()] == sorted([ALICE.node, BOB.node])


async def test_a_site_that_is_in_uses_up_no_other_invite(store: Store) -> None:
    await let_in(store, ALICE.node, "lab-a")
    ticket = Ticket.make("another")
    await store.do(add_invite, ticket.row())
    assert (await store.do(enrol, ALICE.node, "other", ticket.id, NOW)).site.name == "lab-a"
    assert store.invites()[0].uses_left == 1


async def test_a_site_has_the_name_it_wants_or_that_of_its_invite_or_its_id(store: Store) -> None:
    ticket = Ticket.make()
    await store.do(add_invite, ticket.row("offered", uses=2))
    assert (await store.do(enrol, ALICE.node, "wanted", ticket.id, NOW)).site.name == "wanted"
    assert (await store.do(enrol, BOB.node, "", ticket.id, NOW)).site.name == "offered"
    assert (await let_in(store, CAROL.node)).site.name == CAROL.node


async def test_a_name_that_is_taken_costs_no_use(store: Store) -> None:
    await let_in(store, ALICE.node, "lab")
    with pytest.raises(Refused, match="is called lab already"):
        await let_in(store, BOB.node, "lab")
    assert store.invites()[0].uses_left == 1
    await store.do(revoke, ALICE.node, NOW)
    assert (await store.do(enrol, BOB.node, "lab", f"for-{BOB.node}", NOW)).site.name == "lab"


async def test_the_first_that_registers_founds_the_run_and_slots_are_the_lowest_free(store: Store) -> None:
    for site in (ALICE, BOB, CAROL):
        await let_in(store, site.node)
    first = await store.do(register, BOB.node, registration(), NOW)
    second = await store.do(register, ALICE.node, registration(), NOW)
    assert (first.founder, first.site.slot, second.founder, second.site.slot) == (BOB.node, 0, BOB.node, 1)
    await store.do(revoke, BOB.node, NOW)
    third = await store.do(register, CAROL.node, registration(), NOW)
    assert third.site.slot == 0
    assert (await store.do(register, ALICE.node, registration("new name"), NOW)).site.slot == 1
    assert next(site for site in store.sites() if site.node == ALICE.node).name == "new name"


async def test_a_revoked_founder_has_an_heir_only_before_the_first_round(store: Store) -> None:
    for site in (ALICE, BOB, CAROL):
        await let_in(store, site.node)
        await store.do(register, site.node, registration(), NOW)
    await store.do(revoke, ALICE.node, NOW)
    assert (await store.do(register, BOB.node, registration(), NOW)).founder == BOB.node
    await store.add_facts([Fact(NOW, "round", BOB.node, {"round": 1})])
    await store.do(revoke, BOB.node, NOW)
    assert (await store.do(register, CAROL.node, registration(), NOW)).founder == BOB.node


async def test_who_was_revoked_stays_out(store: Store) -> None:
    await let_in(store, ALICE.node)
    revoked = await store.do(revoke, ALICE.node, NOW)
    assert revoked.revoked_at == NOW
    with pytest.raises(Stranger, match="was revoked by the run's operator"):
        await store.do(register, ALICE.node, registration(), NOW)
    with pytest.raises(Stranger):
        await store.do(revoke, ALICE.node, NOW)
    ticket = Ticket.make()
    await store.do(add_invite, ticket.row())
    with pytest.raises(Refused, match="start with an empty data folder and a new invite"):
        await store.do(enrol, ALICE.node, "lab-a", ticket.id, NOW)


# --- orders and invites ----------------------------------------------------------------------------


async def test_orders_grow_in_epoch_and_keep_what_they_do_not_change(store: Store) -> None:
    for site in (ALICE, BOB):
        await let_in(store, site.node)
    (paused,) = await store.do(set_order, [ALICE.node], "pause", None, NOW)
    assert (paused.node, paused.epoch, paused.activity, paused.assignment) == (ALICE.node, 2, "pause", REPLICA)
    assigned = await store.do(set_order, None, None, {"stage": {"index": 1}}, NOW)
    assert {order.node: (order.epoch, order.activity) for order in assigned} == {
        ALICE.node: (3, "pause"),
        BOB.node: (2, "train"),
    }
    assert store.orders() == sorted(assigned, key=lambda order: order.node)
    assert [fact.body["epoch"] for fact in of_kind(store, "order") if fact.node == ALICE.node] == [2, 3]
    assert await store.do(set_order, [], "stop", None, NOW) == []


async def test_an_order_for_all_holds_for_sites_to_come_and_not_for_those_revoked(store: Store) -> None:
    await let_in(store, ALICE.node)
    await store.do(revoke, ALICE.node, NOW)
    assert await store.do(set_order, None, "pause", None, NOW) == []
    assert (await let_in(store, BOB.node)).order.activity == "pause"


async def test_there_is_an_end_to_open_invites(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "OPEN_INVITES", 2)
    first, second, third = (Ticket.make(name) for name in ("first", "second", "third"))
    await store.do(add_invite, first.row(hours=1))
    await store.do(add_invite, second.row())
    with pytest.raises(Refused, match="2 invites are open: revoke some"):
        await store.do(add_invite, third.row())
    await store.do(revoke_invite, second.id, NOW)
    await store.do(add_invite, third.row())
    with pytest.raises(Refused, match="there is no invite fourth"):
        await store.do(revoke_invite, "fourth", NOW)


# --- reports ---------------------------------------------------------------------------------------


def report(first: int, count: int, stream: bytes = b"s", dropped: int = 0) -> Report:
    facts = [note(str(number)) for number in range(first, first + count)]
    return Report(ALICE.node, stream, first, facts, dropped)


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=12))
def test_each_record_is_stored_once_however_reports_overlap(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[tuple[int, int]]
) -> None:
    async def scenario() -> None:
        store = open_store(tmp_path_factory.mktemp("reports"))
        sent: set[int] = set()
        stored = 0
        for back, count in cuts:  # a site sends again from any record that it has sent before, and some new ones
            first = max(stored - back, 0)
            stored = await store.do(take_report, report(first, count), NOW)
            sent |= set(range(first, first + count))
            assert stored == len(sent)
        assert texts(store) == [str(number) for number in sorted(sent)]
        await store.close()

    asyncio.run(scenario())


async def test_what_a_site_lost_is_said_once(store: Store) -> None:
    await store.do(take_report, report(0, 2), NOW)
    assert await store.do(take_report, report(10, 1, dropped=8), NOW) == 11
    await store.do(take_report, report(10, 2, dropped=8), NOW)
    assert texts(store) == ["0", "1", "10", "11"]
    assert texts(store, "event") == ["8 records of this site are lost: it could not hand them over for too long"]


async def test_streams_are_apart_and_old_ones_are_forgotten(store: Store, tmp_path: Path) -> None:
    for number in range(STREAMS + 1):
        assert await store.do(take_report, report(0, 1, stream=bytes([number])), NOW) == 1
    with closing(sqlite3.connect(tmp_path / "run.db")) as file:
        assert file.execute("SELECT count(*) FROM streams").fetchone()[0] == STREAMS
    assert await store.do(take_report, report(0, 1, stream=b"\x10"), NOW) == 1
    assert len(texts(store)) == STREAMS + 1


async def test_a_full_disk_is_said_and_what_was_acknowledged_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    await store.do(take_report, report(0, 3), NOW)
    pages = await store.do(lambda it: it.execute("PRAGMA page_count").fetchone()[0])
    await store.do(lambda it: it.execute(f"PRAGMA max_page_count = {pages + 2}").fetchone())
    for _ in range(3):
        with pytest.raises(sqlite3.OperationalError, match="full"):
            await store.do(take_report, report(3, 200), NOW)
    assert store.problem == "database or disk is full"
    assert caplog.text.count("the database takes nothing") == 1
    assert texts(store) == ["0", "1", "2"]
    await store.do(lambda it: it.execute("PRAGMA max_page_count = 100000").fetchone())
    assert await store.do(take_report, report(3, 200), NOW) == 203
    assert store.problem == ""
    await store.close()
    again = open_store(tmp_path)
    assert texts(again) == [str(number) for number in range(203)]
    await again.close()


async def test_a_damaged_database_is_said(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    await store.close()
    with closing(sqlite3.connect(tmp_path / "run.db", isolation_level=None)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'streams'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    with (tmp_path / "run.db").open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    store = open_store(tmp_path)
    with pytest.raises(sqlite3.DatabaseError, match="malformed"):
        await store.do(take_report, report(0, 3), NOW)
    assert store.problem == "database disk image is malformed"
    await store.close()


PATH = Path("run.db")
ONE, TWO = "CREATE TABLE first (a)", "ALTER TABLE first ADD COLUMN b DEFAULT 7; CREATE TABLE second (c)"


@pytest.fixture
def connection() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", isolation_level=None)


def version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def test_a_database_of_version_1_keeps_what_it_holds(connection: sqlite3.Connection) -> None:
    migrate(connection, PATH, (ONE,))
    connection.execute("INSERT INTO first VALUES (1)")
    migrate(connection, PATH, (ONE, TWO))
    assert connection.execute("SELECT a, b FROM first").fetchall() == [(1, 7)]
    assert version(connection) == 2
    migrate(connection, PATH, (ONE, TWO))
    assert version(connection) == 2


def test_a_step_that_fails_leaves_the_version_before_it(connection: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.OperationalError):
        migrate(connection, PATH, (ONE, "CREATE TABLE half (a); CREATE TABLE first (a)"))
    connection.rollback()
    assert version(connection) == 1
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("first",)]


def test_all_steps_make_the_present_tables(connection: sqlite3.Connection) -> None:
    migrate(connection, PATH)
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert tables >= {
        "facts",
        "sites",
        "invites",
        "streams",
        "orders",
        "meta",
        "expert_plans",
        "expert_jobs",
        "snapshots",
    }
    assert version(connection) == len(MIGRATIONS)


def test_a_database_that_has_revoked_sites_gets_a_version_of_their_list(connection: sqlite3.Connection) -> None:
    migrate(connection, PATH, MIGRATIONS[:2])
    sites = [("a", None), ("b", 1000.5), ("c", 999.0)]
    connection.executemany(
        "INSERT INTO sites (node, name, enrolled_at, invite, revoked_at) VALUES (?1, ?1, 0, '', ?2)", sites
    )
    migrate(connection, PATH)
    assert connection.execute("SELECT * FROM meta").fetchall() == [("revocations", "1000500")]


def test_a_database_without_revoked_sites_gets_none(connection: sqlite3.Connection) -> None:
    migrate(connection, PATH)
    assert connection.execute("SELECT * FROM meta").fetchall() == []


def test_a_plan_of_experts_that_is_there_knows_the_nodes_of_the_sites(connection: sqlite3.Connection) -> None:
    migrate(connection, PATH, MIGRATIONS[:4])
    sites = [("a", "lab-0", None), ("b", "lab-1", 9.0)]
    connection.executemany(
        "INSERT INTO sites (node, name, enrolled_at, invite, revoked_at) VALUES (?, ?, 0, '', ?)", sites
    )
    connection.execute("INSERT INTO expert_plans VALUES ('p', 1.0, '{}')")
    migrate(connection, PATH)
    assert connection.execute("SELECT nodes FROM expert_plans").fetchall() == [('{"lab-0":"a"}',)]


async def test_a_database_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "run.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(PierError, match=r"written by a newer Pier \(version 99 .*\n.*Upgrade Pier here"):
        open_store(tmp_path)
