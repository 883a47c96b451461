"""How a site comes into a run: its folder, its token, and hellos over real sockets."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer.hub_cases import made

from pier_node.base.errors import PierError
from pier_node.config.commented import run_toml
from pier_node.config.presets import DATA, RUN_TOML
from pier_node.config.run import RunConfig, load
from pier_node.identity.certificates import authority, authority_key, credentials
from pier_node.identity.node import Identity, Signer, Token
from pier_node.rounds.commitments import Commitments
from pier_node.rounds.double_votes import Convicted
from pier_node.rounds.folder import SiteRecord, load_run, save_run
from pier_node.rounds.proofs import PROOFS_FILE, Proofs
from pier_node.rounds.revocations import REVOKED, Revoked, signed
from pier_node.rounds.roster import Roster, sign_entry
from pier_node.rounds.statements import SignedStatements
from pier_node.site import join
from pier_node.site.coordinator.link import Enrolment
from pier_node.site.join import Reception, check_start, find_run, find_site, free_slot, with_run_here
from pier_node.site.journal import Journal
from pier_node.site.settings import Settings
from pier_node.trainer.model.hub import read_config
from pier_node.trainer.parallel import Parallel
from pier_node.wire.carrier import HELLO, PROTOCOL, TOKENIZER_PART, PeerLost, PeerRefused
from pier_node.wire.grpc.carrier import GrpcCarrier
from pier_node.wire.transport import Transport
from pier_proto.v1.peer_pb2 import HelloReply, HelloRequest, Pulse, Site

MULTIADDR = "/ip4/10.0.0.1/tcp/7700/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
PIPELINE = "[run]\nsites = 2\n[pipeline]\nstages = 2\n"
PROGRAM = '[program]\nstep_tokens = 8\ntensors = ["weight 2x3"]\n[outer]\nalgorithm = "diloco"\n'
CONFIG = RunConfig.model_validate({"run": {"name": "here", "sites": 3}})


class Here(NamedTuple):
    """A site that says hello."""

    carrier: GrpcCarrier
    roster: Roster
    reception: Reception
    me: Site
    revoked: Revoked


@asynccontextmanager
async def site(folder: Path, name: str, token: Token | None = None, config: RunConfig = CONFIG) -> AsyncIterator[Here]:
    """A site that says hello; without a token it has no TLS."""
    identity = Identity.load_or_create(folder / name)
    carrier = GrpcCarrier(identity.node, config.hash(), credentials(identity, token) if token else None)
    me = Site(node=identity.node, name=name)
    roster = Roster(carrier, lambda: Pulse(site=me), signer=Signer(identity, config.hash()))

    def bar(nodes: Iterable[str], why: str = REVOKED) -> None:
        roster.bar(nodes, why)
        carrier.refuse(nodes, why)

    revoked = Revoked(folder / name, authority(token or Token.new(config.hash())), config.hash(), bar)
    revoked.restore()
    statements = SignedStatements(Signer(identity, config.hash()))
    convicted = Convicted(folder / name, statements, Proofs(folder / name / PROOFS_FILE), bar)
    reception = Reception(carrier, roster, config, lambda: me, convicted, revoked)
    carrier.serve(HELLO, reception.answer)
    carrier.serve(TOKENIZER_PART, reception.part_of_tokenizer)
    me.address = f"127.0.0.1:{await carrier.start('127.0.0.1', 0)}"
    sign_entry(me, Signer(identity, config.hash()), version=1)
    try:
        yield Here(carrier, roster, reception, me, revoked)
    finally:
        await roster.stop()
        await carrier.stop()


def write_run(folder: Path, text: str = '[run]\nname = "here"\nsites = 3\n') -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


async def test_a_founder_gets_a_token_for_its_run(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "data", run=write_run(tmp_path))
    member = await find_run(settings)
    assert member.config == CONFIG
    assert member.token is not None
    member.token.require_run(CONFIG.hash())
    again = await find_run(settings)
    assert (again.token, again.identity.node) == (member.token, member.identity.node)


@pytest.mark.parametrize("transport", ["grpc", "hivemind"])
async def test_an_invitation_says_all_that_others_type(tmp_path: Path, transport: Transport) -> None:
    member = await find_run(Settings(tmp_path / "data", run=write_run(tmp_path), transport=transport))
    way = " --transport hivemind" if transport == "hivemind" else ""
    told = member.invitation("10.0.0.1:7700")
    assert f"\n  pier-node start --peers 10.0.0.1:7700{way}\n" in told
    assert f"\n  {member.token}\n" in told
    logged = member.invitation("10.0.0.1:7700", kept=Path("/lab/run.token"))
    assert "that has a copy of /lab/run.token:" in logged
    assert logged.endswith(f"  pier-node start --peers 10.0.0.1:7700{way} --token-file run.token\n")
    assert "pier1-" not in logged


async def test_without_a_token_an_invitation_says_so(tmp_path: Path) -> None:
    member = await find_run(Settings(tmp_path / "data", run=write_run(tmp_path), insecure=True))
    assert member.invitation("10.0.0.1:7700").endswith("pier-node start --peers 10.0.0.1:7700 --insecure\n")


async def test_a_folder_goes_on_without_any_option(tmp_path: Path) -> None:
    first = await find_run(Settings(tmp_path / "data", run=write_run(tmp_path)))
    assert (await find_run(Settings(tmp_path / "data"))).config == first.config


async def test_a_run_without_a_coordinator_has_no_witness(tmp_path: Path) -> None:
    run = write_run(tmp_path, "[run]\nwitness = true\n")
    with pytest.raises(PierError, match="this run has no coordinator, which would be the witness"):
        await find_run(Settings(tmp_path / "data", run=run))
    assert load_run(tmp_path / "data") is None


async def test_nothing_to_go_by(tmp_path: Path) -> None:
    with pytest.raises(PierError, match="does not know which run"):
        await find_run(Settings(tmp_path / "data"))


@pytest.mark.parametrize(
    "left", ["checkpoints/round-00000000", "states/round-00000000", "journal.json", "proofs.bin", "logs"]
)
async def test_until_its_first_round_a_founder_may_correct_its_run(tmp_path: Path, left: str) -> None:
    data = tmp_path / "data"
    first = await find_run(Settings(data, run=write_run(tmp_path)))
    SiteRecord(founder=True, slot=2, name="a").save(data)
    if left == "journal.json":  # of a site that gave its vote away when it stopped
        Journal(data / left).keep(Commitments.fresh(0, first.identity.node).giving("b" * 16))
    elif left == "proofs.bin":
        (data / left).touch()
    else:
        (data / left).mkdir(parents=True)
    corrected = Settings(data, run=write_run(tmp_path, '[run]\nname = "here"\nsites = 2\n'))
    check_start(corrected)
    second = await find_run(corrected)
    assert second.config.run.sites == 2
    assert second.token is not None
    second.token.require_run(second.config.hash())
    assert second.identity.node == first.identity.node
    assert second.record is None
    assert {path.name for path in data.iterdir()} == {"node.key", "run.token", "run.json"} | (
        {left.partition("/")[0]} & {"logs", "checkpoints", "states"}
    )
    assert not [*data.glob("*/round-*")]
    assert (await find_run(Settings(data))).token == second.token


@pytest.mark.parametrize("done", ["checkpoints/round-00000001", "states/round-00000001", "promise"])
async def test_after_its_first_round_a_run_never_changes(tmp_path: Path, done: str) -> None:
    data = tmp_path / "data"
    await find_run(Settings(data, run=write_run(tmp_path)))
    if done == "promise":
        Journal(data / "journal.json").keep(Commitments.fresh(0, "a").promising((1, "a")))
    else:
        (data / done).mkdir(parents=True)
    changed = write_run(tmp_path, '[run]\nname = "there"\n')
    with pytest.raises(PierError, match="belongs to another run"):
        await find_run(Settings(data, run=changed))


@pytest.mark.parametrize(
    ("text", "said"),
    [('[run]\nname = "here"\nsites = 3\n', False), ('[run]\nname = "there"\n', True), ("[ru", True)],
)
async def test_a_run_toml_that_no_longer_counts_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, said: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(DATA)
    assert with_run_here(replace(settings, run=write_run(tmp_path))).run
    assert with_run_here(settings).run == RUN_TOML
    await find_run(with_run_here(settings))
    (DATA / "states" / "round-00000001").mkdir(parents=True)
    write_run(tmp_path, text)
    assert with_run_here(settings).run is None
    assert ("run.toml differs from the run in pier-data, which continues as it is" in caplog.text) == said


async def test_until_its_first_round_a_site_may_join_another_run(tmp_path: Path) -> None:
    await find_run(Settings(tmp_path / "data", run=write_run(tmp_path, '[run]\nname = "wrong"\n')))
    token = Token.new(CONFIG.hash())
    async with site(tmp_path, "a", token) as near:
        member = await find_run(Settings(tmp_path / "data", peers=(near.me.address,), token=str(token)))
    assert (member.config, member.token) == (CONFIG, token)


@pytest.mark.parametrize(
    ("toml", "more", "problem"),
    [
        ('[data]\nsource = "text"\npath = "/nowhere"\n', {}, "/nowhere"),
        ('[data]\ntokenizer = "/no/tokenizer.json"\n', {}, "/no/tokenizer.json"),
        ("[model]\nvocab_size = 128\n", {}, "vocab_size = 128"),
        ("", {"data": "/mistyped"}, "/mistyped"),
        ("[inner]\nbatch_size = 2\n", {"workers": 3}, "--workers 3"),
        ("", {"shared_data": True}, "--shared-data would have no effect"),
        (PIPELINE, {"workers": 2}, "--workers would have no effect"),
        (PIPELINE, {"parallel": Parallel("fsdp")}, "--parallel, --tensor, --checkpointing would have no effect"),
        (PIPELINE, {"checkpoint_every": 5}, "--checkpoint-every would have no effect"),
        (PROGRAM, {"data": "/mine", "command": "x"}, "--dataset would have no effect: the site's own program"),
        (PROGRAM, {"workers": 2, "command": "x"}, "--workers would have no effect"),
    ],
)
def test_what_training_needs_is_looked_at_before_anything_is_written(
    tmp_path: Path, toml: str, more: dict[str, Any], problem: str
) -> None:
    with pytest.raises(PierError, match=problem):
        check_start(Settings(tmp_path / "data", run=write_run(tmp_path, toml), **more))
    assert not (tmp_path / "data").exists()


async def test_a_site_that_joins_looks_at_its_data_before_it_belongs_to_the_run(tmp_path: Path) -> None:
    async with site(tmp_path, "a") as near:
        settings = Settings(tmp_path / "data", peers=(near.me.address,), insecure=True)
        with pytest.raises(PierError, match="/mistyped"):
            await find_run(replace(settings, data="/mistyped"))
        assert load_run(tmp_path / "data") is None
        assert (await find_run(settings)).config == CONFIG


def test_only_sites_of_the_first_stage_need_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = write_run(tmp_path, '[run]\nsites = 2\n[pipeline]\nstages = 2\n[data]\nsource = "text"\npath = "/nowhere"\n')
    check_start(Settings(tmp_path / "data", run=run))
    assert "this site cannot hold the first stage, which reads the data: data path /nowhere" in caplog.text
    with pytest.raises(PierError, match="/mistyped"):
        check_start(Settings(tmp_path / "data", run=run, data="/mistyped"))


def with_tokenizer(folder: Path, more: str = "") -> tuple[Path, Path]:
    """A run with a tokenizer of its own; and that."""
    file = folder / "words.json"
    library = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(file))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return write_run(folder, f'{more}[data]\ntokenizer = "{file}"\ntokenizer_hash = "{digest}"\n'), file


async def test_a_founder_keeps_the_tokenizer(tmp_path: Path) -> None:
    run, file = with_tokenizer(tmp_path)
    settings = Settings(tmp_path / "data", run=run)
    check_start(settings)
    first = await find_run(settings)
    assert first.config.data.tokenizer == str(tmp_path / "data" / "tokenizer.json")
    file.unlink()
    for again in (settings, Settings(tmp_path / "data")):
        check_start(again)
        assert (await find_run(again)).config == first.config


async def test_a_site_that_joins_asks_for_the_tokenizer_until_somebody_sends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, file = with_tokenizer(tmp_path)
    content = file.read_bytes()
    monkeypatch.setattr(join, "PATIENCE", 0.5)
    async with site(tmp_path, "a", config=load(run)) as near:
        settings = Settings(tmp_path / "data", peers=(near.me.address,), insecure=True)
        file.unlink()
        with pytest.raises(PierError, match=r"nobody has sent it: .*the file is not there either"):
            await find_run(settings)
        near.me.address, address = "", near.me.address  # as who only answers `doctor`
        with pytest.raises(PierError, match="who answers there knows of no site"):
            await find_run(settings)
        near.me.address = address
        file.write_bytes(content)
        monkeypatch.setattr(join, "PATIENCE", 60.0)
        assert (await find_run(settings)).config.hash() == load(run).hash()
    assert (tmp_path / "data" / "tokenizer.json").read_bytes() == content


async def test_without_the_tokenizer_nobody_founds_a_run_but_a_pipeline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, file = with_tokenizer(tmp_path)
    file.unlink()
    with pytest.raises(PierError, match="No such file or directory"):
        check_start(Settings(tmp_path / "data", run=run))
    with pytest.raises(PierError, match=r"the run's tokenizer\.json is not here, and nobody has sent it") as caught:
        await find_run(Settings(tmp_path / "data", run=run))
    assert caught.value.remedy == f"Copy that of the run's founder to {tmp_path / 'data' / 'tokenizer.json'}."
    run, file = with_tokenizer(tmp_path, "[run]\nsites = 2\n[pipeline]\nstages = 2\n")
    file.unlink()
    await find_run(Settings(tmp_path / "other", run=run))
    assert "there is no site to ask" in caplog.text


async def test_a_silent_site_is_asked_where_the_coordinator_says_that_it_is_now(tmp_path: Path) -> None:
    """Both were started again on other ports: neither reaches the other where it was, and no signed entry says more."""
    token = Token.new(CONFIG.hash())
    async with site(tmp_path, "a", token) as near, site(tmp_path, "b", token) as far:
        signer = Signer(Identity.load_or_create(tmp_path / "b"), CONFIG.hash())
        before = Site(node=far.me.node, name="b", address="127.0.0.1:1")
        sign_entry(before, signer, version=1)
        sign_entry(far.me, signer, version=2)
        near.roster.add(before)
        near.roster.add(Site(node=far.me.node, address=far.me.address))
        assert near.roster.address(far.me.node) == before.address, "nobody signed the other one"
        async with asyncio.timeout(60):
            while not near.roster.alive(far.me.node):
                await near.roster.changed.wait(1.0)
        assert near.roster.address(far.me.node) == far.me.address


async def test_peers_need_a_token(tmp_path: Path) -> None:
    with pytest.raises(PierError, match="needs the --token"):
        await find_run(Settings(tmp_path / "data", peers=("127.0.0.1:1",)))


async def test_a_site_that_has_lost_its_token_makes_no_other(tmp_path: Path) -> None:
    """With a token of its own, it would wait forever for sites that refuse it."""
    folder = tmp_path / "data"
    await find_run(Settings(folder, run=write_run(tmp_path)))
    other = Site(node="a" * 16, address="127.0.0.1:1")
    SiteRecord(founder=True, slot=0).with_peers([other]).save(folder)
    Token.path(folder).unlink()
    with pytest.raises(PierError, match=r"run\.token is gone.*\nCopy it from"):
        check_start(Settings(folder))
    assert not Token.path(folder).exists()
    SiteRecord(founder=True, slot=0).save(folder)
    assert (await find_run(Settings(folder))).token, "a founder whom nobody has joined may make another"


async def test_a_token_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    save_run(tmp_path / "data", CONFIG)
    other = Token.new(bytes(32))
    with pytest.raises(PierError, match="the token is for run"):
        await find_run(Settings(tmp_path / "data", token=str(other)))


async def test_a_joining_site_pulls_the_configuration(tmp_path: Path) -> None:
    async with site(tmp_path, "a") as (_, _, _, me, _):
        member = await find_run(Settings(tmp_path / "data", peers=(me.address,), insecure=True))
    assert member.config == CONFIG
    assert member.token is None


async def test_hello_spreads_to_everybody(tmp_path: Path) -> None:
    async with site(tmp_path, "a") as a, site(tmp_path, "b") as b, site(tmp_path, "c") as c:
        assert await b[2].introduce([a[3].address]) == 1
        assert await c[2].introduce([a[3].address]) == 2, "it hears of b from a"
        assert {len(each[1].contacts) for each in (a, b, c)} == {2}


async def test_a_site_whose_folder_was_copied_hears_of_the_copy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with site(tmp_path, "a") as a, site(tmp_path, "b") as b, site(tmp_path, "a") as copy:
        await a.reception.introduce([b.me.address])
        assert "copy" not in caplog.text
        sign_entry(copy.me, Signer(Identity.load_or_create(tmp_path / "a"), CONFIG.hash()), version=2)
        await copy.reception.introduce([b.me.address])
        assert "copy" not in caplog.text, "the newer one cannot know"
        for _ in range(2):
            await a.reception.introduce([b.me.address])
        assert caplog.text.count(f"others know this site at {copy.me.address}, which is not its address") == 1


async def test_a_roster_is_sent_again_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(tmp_path, "a") as a, site(tmp_path, "b") as b, site(tmp_path, "c") as c:
        greet, rosters = b.carrier.greet, list[list[str]]()

        async def greeting(address: str, request: HelloRequest, timeout: float) -> HelloReply:
            reply = await greet(address, request, timeout)
            rosters.append([it.name for it in reply.roster])
            return reply

        monkeypatch.setattr(b.carrier, "greet", greeting)
        for _ in range(2):
            await b.reception.introduce([a.me.address])
        await c.reception.introduce([a.me.address])
        await b.reception.introduce([a.me.address])
        assert rosters[:3] == [["a", "b"], [], ["a", "b", "c"]]
        assert c.me.node in b.roster.contacts
        sign_entry(a.me, Signer(Identity.load_or_create(tmp_path / "a"), CONFIG.hash()), version=2)
        await b.reception.introduce([a.me.address])
        assert rosters[-1] == ["a", "b", "c"], "a was started again"


async def test_a_site_that_was_forgotten_is_heard_of_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(tmp_path, "a") as a, site(tmp_path, "b") as b:
        async with site(tmp_path, "c") as c:
            await c.reception.introduce([a.me.address])
        await b.reception.introduce([a.me.address])
        assert c.me.node in b.roster.contacts
        a.roster.keep([c.me.node])  # so a does not forget it
        monkeypatch.setattr("pier_node.rounds.roster.FORGOTTEN", 0.0)
        await asyncio.wait_for(b.roster.changed.until(lambda: c.me.node not in b.roster.contacts), 60.0)
        monkeypatch.undo()
        await b.reception.introduce([a.me.address])
        assert c.me.node in b.roster.contacts


async def test_silent_peers_do_not_delay_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(tmp_path, "a") as (carrier, _, reception, *_):
        all_asked = asyncio.Barrier(3)

        async def silence(address: str, request: HelloRequest, timeout: float) -> HelloReply:
            await all_asked.wait()
            raise PeerLost(address, "no connection")

        monkeypatch.setattr(carrier, "greet", silence)
        assert await asyncio.wait_for(reception.introduce(["h:1", "h:2", "h:3"]), 60.0) == 0


async def test_a_silence_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with site(tmp_path, "a") as (carrier, _, reception, *_):

        async def silence(address: str, request: HelloRequest, timeout: float) -> HelloReply:
            raise PeerLost(address, "no connection")

        monkeypatch.setattr(carrier, "greet", silence)
        for _ in range(3):
            await reception.introduce(["h:1"])
    assert caplog.messages == ["no hello from h:1: no connection"]


async def test_of_a_site_that_the_roster_knows_the_roster_tells(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with site(tmp_path, "a") as (_, roster, _, me, _), site(tmp_path, "b") as (_, _, joining, *_):
        async with site(tmp_path, "gone") as (_, _, _, gone, _):
            roster.add(gone)
        await joining.introduce([gone.address, me.address])
    assert [text for text in caplog.messages if text.startswith("no hello from")] == []


async def test_another_protocol_is_told_so(tmp_path: Path) -> None:
    async with site(tmp_path, "a") as (_, _, _, me, _), site(tmp_path, "b") as (carrier, *_):
        with pytest.raises(PeerRefused, match="protocol"):
            await carrier.greet(me.address, HelloRequest(protocol=PROTOCOL + 1, site=Site(node=carrier.node)), 60.0)


async def test_a_clock_that_is_off_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with site(tmp_path, "a") as one, site(tmp_path, "b") as other:
        monkeypatch.setattr(join, "CLOCKS", -1.0)
        for _ in range(2):
            assert await one.reception.introduce([other.me.address]) == 1
    [said] = [it for it in caplog.messages if "clock is" in it]
    assert re.match(rf"b \({re.escape(other.me.address)}\): its clock is \d+ s ", said)
    assert "NTP" in said


async def test_slots_are_dealt_from_below(tmp_path: Path) -> None:
    async with site(tmp_path, "a") as (carrier, roster, *_):
        assert free_slot(roster, 3) == 0
        for number, slot in enumerate((0, 2)):
            roster.add(Site(node=f"{number:016x}", address=f"127.0.0.1:{number + 1}", slot=slot))
        assert free_slot(roster, 3) == 1
        roster.add(Site(node=f"{9:016x}", address="127.0.0.1:9", slot=1))
        assert free_slot(roster, 3) in range(3), "with all taken, parts are shared"
        assert carrier.node not in roster.contacts


def test_a_site_stays_with_its_transport(tmp_path: Path) -> None:
    peer = Site(node="a" * 16, address=MULTIADDR)
    SiteRecord(False, 1, transport="hivemind").with_peers([peer]).save(tmp_path)
    assert find_site(Settings(tmp_path)) == ("hivemind", SiteRecord.load(tmp_path))
    transport, record = find_site(Settings(tmp_path, transport="grpc"))
    assert (transport, record) == ("grpc", SiteRecord(False, 1))
    assert find_site(Settings(tmp_path / "new")) == ("grpc", None)


@pytest.mark.parametrize(
    ("transport", "peer", "words"),
    [
        ("hivemind", "127.0.0.1:7700", "is not /ip4/ADDRESS/tcp/PORT/p2p/PEER"),
        ("grpc", MULTIADDR, "is of a site on libp2p"),
        ("grpc", "127.0.0.1:x", "is not HOST:PORT"),
    ],
)
async def test_an_address_for_another_transport_is_refused(
    tmp_path: Path, transport: Transport, peer: str, words: str
) -> None:
    with pytest.raises(PierError, match=words):
        await find_run(Settings(tmp_path / "data", peers=(peer,), insecure=True, transport=transport))


async def test_who_was_revoked_is_known_to_all_who_say_hello(tmp_path: Path) -> None:
    token = Token.new(CONFIG.hash())
    secret = credentials(Identity.load_or_create(tmp_path / "mallory"), token)
    mallory = GrpcCarrier(Identity.load_or_create(tmp_path / "mallory").node, CONFIG.hash(), secret)
    async with site(tmp_path, "a", token) as a, site(tmp_path, "b", token) as b, site(tmp_path, "c", token) as c:
        a.revoked.take(signed(authority_key(token), CONFIG.hash(), 1, [mallory.node]))
        await b.reception.introduce([a.me.address])
        await c.reception.introduce([b.me.address])
        asked = HelloRequest(protocol=PROTOCOL, site=Site(node=mallory.node))
        for each in (a, b, c):
            with pytest.raises(PeerRefused, match="was revoked by the run's operator"):
                await mallory.greet(each.me.address, asked, 60.0)
    await mallory.stop()
    async with site(tmp_path, "b", token) as again:
        assert again.revoked.version == 1, "it has the list on its disk"


# --- through a coordinator ----------------------------------------------------------------------


async def test_a_site_that_was_let_in_goes_on_by_itself(tmp_path: Path) -> None:
    save_run(tmp_path, CONFIG)
    Enrolment("10.0.0.9:7790", "c" * 16, "authority", "certificate").save(tmp_path)
    member = await find_run(Settings(tmp_path))
    assert (member.config, member.token) == (CONFIG, None)
    assert member.enrolment is not None
    assert member.enrolment.address == "10.0.0.9:7790"
    assert member.credentials is not None
    await find_run(Settings(tmp_path, coordinator="10.0.0.10:7790"))
    moved = Enrolment.load(tmp_path)
    assert moved is not None
    assert moved.address == "10.0.0.10:7790"


async def test_a_coordinator_wants_an_invite(tmp_path: Path) -> None:
    with pytest.raises(PierError, match="needs the --token of an invite") as error:
        await find_run(Settings(tmp_path / "data", coordinator="10.0.0.9:7790"))
    assert "pier-coordinator invite" in error.value.remedy
    with pytest.raises(PierError, match="this is not a whole token"):
        await find_run(Settings(tmp_path / "data", coordinator="10.0.0.9:7790", token="pier1-abc"))


async def test_a_folder_of_another_run_is_not_taken_over(tmp_path: Path) -> None:
    save_run(tmp_path, CONFIG)
    (tmp_path / "checkpoints" / "round-00000001").mkdir(parents=True)
    with pytest.raises(PierError, match="already belongs to a run"):
        await find_run(Settings(tmp_path, coordinator="10.0.0.9:7790", token="pierinvite1-abc"))


def test_what_a_founder_needs_for_a_model_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    made("qwen2", model, vocab_size=256, max_position_embeddings=64)
    tables = {"model": {**read_config(model).model_dump(exclude_none=True)}}
    (tmp_path / "run.toml").write_text(run_toml(tables))
    settings = Settings(tmp_path / "data", run=tmp_path / "run.toml", weights=model)
    check_start(settings)
    with pytest.raises(PierError, match="weights of a qwen2") as failed:
        check_start(replace(settings, weights=None))
    assert "--from FOLDER" in failed.value.remedy
    with pytest.raises(PierError, match="--tensor 2 is for Pier's own decoder"):
        check_start(replace(settings, parallel=Parallel(tensor=2)))
    for key, value, words in (("context", 128, "reads 64 tokens at most"), ("layers", 9, "model.layers was 9, is 2")):
        (tmp_path / "run.toml").write_text(run_toml({"model": {**tables["model"], key: value}}))
        with pytest.raises(PierError, match=words):
            check_start(settings)
    (tmp_path / "run.toml").write_text(run_toml(tables))
    monkeypatch.setattr("pier_node.config.pretrained.find_spec", lambda _name: None)
    with pytest.raises(PierError, match="is not installed here"):
        check_start(settings)


def test_a_folder_that_is_detached_from_its_run_has_nothing_of_its_pipeline(tmp_path: Path) -> None:
    for name in ("tallies/round-00000000", "given/stage-0/round-00000000", "stage-1/round-00000000", "states/round-1"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("node.key", "events.jsonl", "events.1.jsonl"):
        (tmp_path / name).touch()
    join.forget_run(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node.key", "states"]
    assert not any((tmp_path / "states").iterdir())


def test_a_folder_that_is_detached_from_its_run_has_nothing_of_its_programs_optimizer(tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    for name in ("optimizer-0-of-1.pt", "notes-of-the-program"):
        (tmp_path / "program" / name).touch()
    join.forget_run(tmp_path)
    assert [path.name for path in (tmp_path / "program").iterdir()] == ["notes-of-the-program"]
