"""Numbers with their units, and texts that others made, in the form in which people read them."""

from __future__ import annotations

import math

UNKNOWN = "-"
"""Shown for a number that is not known yet."""


def number(value: float | None, digits: int) -> str:
    """A number with this many digits after the decimal point."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    """A whole number in groups of three digits: 12,345."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def several(value: float, thing: str) -> str:
    """A number of things, in the singular or the plural: 1 round, 2 rounds, 2 batches."""
    ending = "es" if thing.endswith(("ch", "s", "x")) else "s"
    return f"{count(value)} {thing}{'' if count(value) == '1' else ending}"


def percent(fraction: float | None) -> str:
    """A fraction as a percentage: 0.874 -> 87 %."""
    return UNKNOWN if fraction is None else f"{100 * fraction:.0f} %"


def perplexity(nats: float) -> float:
    """e to the power of a loss; inf where that is larger than a float can be."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def amount(size: float) -> str:
    """A size in bytes: 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def rate(bytes_a_second: float) -> str:
    """The speed of a link, in bits per second as is usual: 94.3 Mbit/s."""
    return (
        f"{bytes_a_second * 8 / 1e6:,.3g} Mbit/s" if bytes_a_second < 124e6 else f"{bytes_a_second / 125e6:,.3g} Gbit/s"
    )


def seconds(time: float) -> str:
    """A measured time: 12.3 ms."""
    return f"{time:,.3g} s" if time >= 1 else f"{1000 * time:.3g} ms"


def age(time: float) -> str:
    """Elapsed seconds: 5 min."""
    for unit, longest in (("s", 120), ("min", 120), ("h", 48)):
        if time < longest:
            return f"{time:.0f} {unit}"
        time /= 24 if unit == "h" else 60
    return f"{time:.0f} days"


def span(time: float) -> str:
    """Seconds that something will take: 45.2 s, 12.3 min, 2.35 h."""
    for unit, size, longest in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if time < longest:
            return f"{time / size:.3g} {unit}"
    return f"{time / 86400:.3g} days"


def printable(text: str) -> str:
    """Text that can only print letters on a terminal: a model or a program may write any control character."""
    return "".join(it if it.isprintable() or it in "\n\t" else "\N{REPLACEMENT CHARACTER}" for it in text)
