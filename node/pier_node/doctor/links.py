"""Visits the sites of a run: which site answers at which address, and both directions of the link to each.

How a link is measured is in wire/probe.py, what its rate predicts in rounds/prediction.py. The remedies for a site that
does not reach another follow from the reasons that the wire gives (wire/grpc/reasons.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass

from pier_node.base.address import parse_address
from pier_node.base.units import percent, rate, seconds
from pier_node.config.run import RunConfig
from pier_node.doctor.finding import THIS_SITE, Finding, Verdict
from pier_node.rounds.prediction import Line, exchange_seconds, inner_steps, share_of_compute
from pier_node.site.join import SET_CLOCKS, clock_in_words
from pier_node.wire.addresses import first_hop
from pier_node.wire.carrier import GREETING, PROBE, PROTOCOL, Carrier, PeerLost
from pier_node.wire.probe import ANSWER, LinkSpeed, asking, measure
from pier_proto.v1.peer_pb2 import HelloReply, HelloRequest, ProbeRequest, Site

_SIGNS = (
    ("tokens differ", "Use the token that the run's first site printed; it is also in run.token of its --data folder."),
    ("clocks of the two", "Set the clocks: run NTP at both sites (timedatectl set-ntp true)."),
    ("has expired", "Set the clocks: run NTP at both sites (timedatectl set-ntp true)."),
    ("this is run", "The two sites are in different runs: check --peers, and the --data folder or run.toml at both."),
    ("shows no certificate", "Start every site with --insecure, or none."),
    ("does not speak TLS", "Start every site with --insecure, or none."),
    ("it hung up", "Start every site with --insecure, or none, and all of them with the token of one run."),
    ("speaks protocol", "Install the same version of Pier at every site."),
    ("no such host", "Check how the address is written, or use the IP address."),
    ("cannot be looked up", "Check this machine's name server, or use the IP address."),
    ("two sites advertise", "Give each site an address of its own: start with --advertise HOST:PORT."),
    ("node answers there", "Give each site an address of its own: start with --advertise HOST:PORT."),
)


def to_reach_peer(address: str, reason: str) -> str:
    """Remedy if this site does not reach a peer."""
    _, port = parse_address(first_hop(address))
    signs = (
        (
            "connection refused",
            f"Start that site; if it runs, make it listen on that address: --listen 0.0.0.0:{port}.",
        ),
        (
            "no route",
            "Check this machine's network and the address: a private one is reached from its own network only.",
        ),
        ("firewall", f"At that site: {_open(port)}"),
    )
    return _first(reason, signs + _SIGNS, "The log of that site says more.")


def to_be_reached(address: str, reason: str, seen_as: str) -> str:
    """Remedy if a peer does not reach this site.

    Args:
        address: of this site, as it tells others.
        seen_as: HOST:PORT from which the peer saw this site connect; may be empty.
    """
    host, port = parse_address(first_hop(address))
    signs = (
        (
            "it does not try",
            f"If others reach this site there, start it: they try once it has said so. Else {_other(port)}",
        ),
        ("connection refused", f"Let this site listen on that address: --listen 0.0.0.0:{port}, or {_other(port)}"),
        ("no route", f"Others have no way to {host}: {_other(port)}"),
        ("firewall", f"At this site: {_open(port)}"),
    )
    seen = parse_address(seen_as)[0] if seen_as else host
    hint = f" That peer sees this site as {seen}: try --advertise {seen}:{port}." if seen != host else ""
    return _first(reason, signs + _SIGNS, _open(port)) + hint


def _open(port: int) -> str:
    return f"open TCP port {port} on the firewall and forward it on the router, or {_other(port)}"


def _other(port: int) -> str:
    return f"start with --advertise HOST:{port} and an address that others reach."


def _first(reason: str, signs: tuple[tuple[str, str], ...], otherwise: str) -> str:
    text = next((remedy for sign, remedy in signs if sign in reason), otherwise)
    return text[0].upper() + text[1:]


@dataclass(frozen=True)
class Round:
    """The sites that were met.

    Attributes:
        met: their answers, by the address that answered.
        missed: the reason for no answer, by address.
    """

    met: dict[str, HelloReply]
    missed: dict[str, str]


async def go_round(carrier: Carrier, addresses: Iterable[str], run_hash: bytes) -> Round:
    """Say hello at addresses and to all sites named there, concurrently. Each site is met once, this one not at all."""
    request = HelloRequest(protocol=PROTOCOL, run_hash=run_hash, site=Site(node=carrier.node))
    found, nodes, tried, waiting = Round({}, {}), {carrier.node}, set[str](), set(addresses)
    while waiting:
        tried |= waiting
        answers = await asyncio.gather(*(_greet(carrier, address, request) for address in sorted(waiting)))
        named = [site.address for answer in answers if isinstance(answer, HelloReply) for site in answer.roster]
        for address, answer in zip(sorted(waiting), answers, strict=True):
            if isinstance(answer, PeerLost):
                found.missed[address] = answer.reason
            elif answer.site.node not in nodes:
                nodes.add(answer.site.node)
                found.met[address] = answer
        known = {reply.site.address for reply in found.met.values()}
        waiting = {address for address in named if address} - tried - known
    return found


async def _greet(carrier: Carrier, address: str, request: HelloRequest) -> HelloReply | PeerLost:
    try:
        return await carrier.greet(address, request, GREETING)
    except PeerLost as lost:
        return lost


def missed(name: str, address: str, reason: str) -> Finding:
    """The finding for a site that does not answer; its name may be empty."""
    detail = reason.removeprefix(f"{address}: ")
    seen = f"{address}: {detail}" if name else detail
    return Finding(name or address, "reach it", Verdict.PROBLEM, seen, to_reach_peer(address, reason))


async def visit(
    carrier: Carrier, address: str, hello: HelloReply, own_address: str
) -> tuple[list[Finding], LinkSpeed | None]:
    """Check the link to a site that was met, and back. The link is None if it could not be measured.

    Args:
        own_address: this site's address; "": it does not listen, so the way back is not tried.
    """
    name, node = hello.site.name or hello.site.node, hello.site.node
    carrier.introduce(node, address)
    try:
        link = await measure(asking(carrier, node))
    except PeerLost as lost:
        return [Finding(name, "measure it", Verdict.UNKNOWN, lost.reason)], None
    away = f"answers at {address}, {seconds(link.round_trip)} away"
    findings = [
        Finding(name, "reach it", Verdict.OK, away, values={"round_trip_seconds": link.round_trip}),
        _line(name, link),
        _clock(name, link),
    ]
    if own_address:
        findings.insert(1, await _back(carrier, name, hello, own_address))
    return findings, link


async def _back(carrier: Carrier, name: str, hello: HelloReply, own_address: str) -> Finding:
    """Whether the site reaches this one."""
    try:
        reply = await carrier.call(hello.site.node, PROBE, ProbeRequest(call_back=own_address), ANSWER)
    except PeerLost as lost:
        return Finding(name, "reached by it", Verdict.UNKNOWN, lost.reason)
    if reply.reached:
        return Finding(name, "reached by it", Verdict.OK, f"it reaches this site at {own_address}")
    remedy = to_be_reached(own_address, reply.detail, hello.seen_as)
    verdict = Verdict.UNKNOWN if reply.declined else Verdict.PROBLEM
    return Finding(name, "reached by it", verdict, reply.detail, remedy)


def _line(name: str, link: LinkSpeed) -> Finding:
    values = {"up_bytes_per_second": link.up, "down_bytes_per_second": link.down}
    return Finding(name, "link", Verdict.OK, f"{rate(link.up)} there, {rate(link.down)} back", values=values)


def _clock(name: str, link: LinkSpeed) -> Finding:
    ahead = link.clock_ahead
    values = {"clock_ahead_seconds": ahead}
    detail = clock_in_words(ahead)
    if not detail:
        within = seconds(max(abs(ahead), link.round_trip / 2))
        return Finding(name, "clock", Verdict.OK, f"its clock agrees within {within}", values=values)
    return Finding(name, "clock", Verdict.PROBLEM, detail, SET_CLOCKS, values)


GOOD, POOR = 0.8, 0.5
AIM = 0.9
"""Utilisation that the advice aims at."""
CHECK = "utilisation"


def utilisation_finding(
    config: RunConfig, parameters: int, sites: int, line: Line, speed: float, measured: float | None
) -> Finding:
    """The prediction.

    Args:
        sites: number of sites that take part, this one included.
        line: its rate is 0 if it is not known.
        speed: of this site in inner steps, in tokens per second; 0: not known yet.
        measured: utilisation measured by its daemon so far, including waits for other sites; None: not yet.
    """
    if sites < 2:
        return Finding(THIS_SITE, CHECK, Verdict.OK, "a run of one site exchanges nothing")
    if not line.rate:
        return Finding(THIS_SITE, CHECK, Verdict.UNKNOWN, "no link to another site could be measured")
    exchange = exchange_seconds(config, parameters, sites, line)
    if not speed:
        detail = f"an exchange takes {seconds(exchange)}; its part of the time shows once this site has trained"
        return Finding(THIS_SITE, CHECK, Verdict.UNKNOWN, detail, "", {"exchange_seconds": exchange})
    step = config.step_tokens / speed
    steps = inner_steps(config)
    share = share_of_compute(config, steps * step, exchange)
    so_far = f"; {percent(measured)} so far, waits for others included" if measured is not None else ""
    times = f"H = {steps} inner steps take {seconds(steps * step)}, an exchange {seconds(exchange)}"
    detail = f"{percent(share)} expected: {times}{so_far}"
    values = {"utilisation": share, "exchange_seconds": exchange, "compute_seconds": steps * step}
    if share >= GOOD:
        return Finding(THIS_SITE, CHECK, Verdict.OK, detail, "", values)
    wanted = _round_up((AIM if config.outer.overlap else AIM / (1 - AIM)) * exchange / step)
    wanted += -wanted % config.outer.fragments
    verdict = Verdict.ADVICE if share >= POOR else Verdict.PROBLEM
    return Finding(THIS_SITE, CHECK, verdict, detail, _remedy(config, wanted), {**values, "better_inner_steps": wanted})


def _remedy(config: RunConfig, wanted: int) -> str:
    if config.outer.algorithm == "sync":
        return (
            f'Synchronous training needs a faster link: choose algorithm = "diloco" with inner_steps = {wanted}, and '
            "what else `pier-node init` writes in [outer]."
        )
    less = _less_traffic(config)
    if wanted > config.inner.total_steps:
        return (
            f"The run's {config.inner.total_steps} inner steps are fewer than the H = {wanted} needed for "
            f"{100 * AIM:.0f} %: give the slowest site a faster link, or train a smaller model{less}."
        )
    return (
        f"Raise outer.inner_steps to H = {wanted} in the run.toml of a new run (it never changes within one) for "
        f"{100 * AIM:.0f} %, or give the slowest site a faster link{less}."
    )


def _less_traffic(config: RunConfig) -> str:
    settings = [] if config.outer.codec != "none" else ['codec = "int4" (an eighth of the bytes)']
    if not config.outer.overlap:  # whole models that arrive late cost loss: docs/results.md, Convergence
        parts = "" if config.outer.fragments > 1 or config.outer.algorithm == "noloco" else " with fragments = 5"
        settings.append(f"overlap = true{parts} (train on while sending)")
    return f"; or set outer.{' and outer.'.join(settings)}" if settings else ""


def _round_up(steps: float) -> int:
    """Round up to two digits: 1234 -> 1300."""
    unit = 10 ** max(0, len(str(math.ceil(steps))) - 2)
    return int(math.ceil(steps / unit) * unit)
