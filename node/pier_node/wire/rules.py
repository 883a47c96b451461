"""Rules for the fields of protobuf messages, and the walk through a message that applies them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from google.protobuf.message import Message

from pier_node.wire.carrier import BadMessage


@dataclass(frozen=True)
class Only:
    """A value that `holds`; `allowed` says in words which those are."""

    allowed: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Part:
    """A message in a message; `needed` unless it may be left out."""

    needed: bool = False


@dataclass(frozen=True)
class Many:
    """A list of at most `most` items; `ordered`: strictly increasing, so that none occurs twice."""

    item: Only | Part
    most: int
    ordered: bool = False


@dataclass(frozen=True)
class Table:
    """A map of at most `most` entries."""

    key: Only
    value: Only
    most: int


Rule = Only | Part | Many | Table


@dataclass(frozen=True)
class Rules:
    """What messages may hold.

    Attributes:
        fields: a rule for every field of every message.
        consistent: what is wrong between the fields of a message, in words; "" if nothing is.
    """

    fields: Mapping[type[Message], Mapping[str, Rule]]
    consistent: Mapping[type[Message], Callable[[Any], str]]

    def check(self, message: Message) -> None:
        """Raise BadMessage, naming field, value and what is allowed, unless all rules hold."""
        self._message(message, type(message).__name__)

    def _message(self, message: Message, where: str) -> None:
        for field, rule in self.fields[type(message)].items():
            if not isinstance(rule, Part) or message.HasField(field):
                self._value(rule, getattr(message, field), f"{where}.{field}")
            elif rule.needed:
                raise BadMessage(f"{where}.{field} is missing")
        consistent = self.consistent.get(type(message))
        if consistent and (problem := consistent(message)):
            raise BadMessage(f"{where} {problem}")

    def _value(self, rule: Rule, value: Any, where: str) -> None:
        match rule:
            case Only():
                if not rule.holds(value):
                    raise BadMessage(f"{where} = {_shown(value)}: must be {rule.allowed}")
            case Part():
                self._message(value, where)
            case Many():
                self._list(rule, value, where)
            case Table():
                self._list(Many(rule.key, rule.most), value.keys(), where)
                self._list(Many(rule.value, rule.most), value.values(), where)

    def _list(self, rule: Many, values: Collection[Any], where: str) -> None:
        if len(values) > rule.most:
            raise BadMessage(f"{where} has {len(values)} items: must have at most {rule.most}")
        for index, value in enumerate(values):
            self._value(rule.item, value, f"{where}[{index}]")
        if rule.ordered and not increasing(values):
            raise BadMessage(f"{where}: must be in order, each once")


def increasing(values: Collection[Any]) -> bool:
    """Whether each value is greater than the one before."""
    return all(first < second for first, second in pairwise(values))


def _shown(value: Any) -> str:
    """A value as it may stand in an error message: short, and without what a terminal would act upon."""
    text = f"{len(value)} bytes" if isinstance(value, bytes) else ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
