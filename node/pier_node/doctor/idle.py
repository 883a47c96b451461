"""Whether a line with latency is used at once when a round begins: Linux forgets the speed of an idle connection.

`net.ipv4.tcp_slow_start_after_idle`: see tcp(7). What it costs: docs/operations.md, slow lines.
"""

from __future__ import annotations

from pathlib import Path

from pier_node.doctor.finding import THIS_SITE, Finding, Verdict

SETTING = "net.ipv4.tcp_slow_start_after_idle"
FAR = 0.03
"""Seconds there and back from which it costs a noticeable part of a round to become fast again."""


def idle_finding(forgets: bool, round_trip: float) -> list[Finding]:
    """What to set, if it matters.

    Args:
        forgets: whether the kernel is set so, as it is by default.
        round_trip: of the farthest peer, in seconds.
    """
    if not forgets or round_trip < FAR:
        return []
    detail = f"each round begins slowly: {SETTING} is 1, and the farthest peer is {1000 * round_trip:.0f} ms away"
    return [Finding(THIS_SITE, "idle lines", Verdict.ADVICE, detail, f"As root: sysctl -w {SETTING}=0")]


def forgets_idle_lines() -> bool:
    """Whether this machine's kernel, or this container's network, is set so."""
    try:
        return Path("/proc/sys", *SETTING.split(".")).read_text().strip() == "1"
    except OSError:
        return False
