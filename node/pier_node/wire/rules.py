"""Rules for the fields of protobuf messages, and the traversal of a message that applies them.

The second half holds the rules for single values, from which bounds.py composes the rules for whole messages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from pier_node.base.address import is_address
from pier_node.config.run import SITES
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, MOMENTUM
from pier_node.wire.addresses import are_routes
from pier_node.wire.carrier import CHUNK_BYTES, BadMessage


@dataclass(frozen=True)
class Only:
    """A value for which `holds` is true; `allowed` describes such values in words."""

    allowed: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Part:
    """A message inside a message; `needed` means that it cannot be left out."""

    needed: bool = False


@dataclass(frozen=True)
class Many:
    """A list of at most `most` items; `ordered` means strictly increasing, so that no item occurs twice."""

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
M = TypeVar("M", bound=Message)


def complete(fields: Mapping[type[Message], Mapping[str, Rule]]) -> dict[type[Message], dict[str, Rule]]:
    """A rule for every field of these messages, in their order.

    Fields without a rule of their own: a boolean may be anything, an enumeration must be one of the values that this
    version knows, and a message may be left out.

    Raises:
        ValueError: a field of another kind has no rule, or a rule is for no field.
    """
    for kind, given in fields.items():
        if unknown := given.keys() - kind.DESCRIPTOR.fields_by_name.keys():
            raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    return {
        kind: {field.name: given.get(field.name) or _usual(field) for field in kind.DESCRIPTOR.fields}
        for kind, given in fields.items()
    }


def _usual(field: Any) -> Rule:  # a FieldDescriptor: protobuf has two
    if not field.is_repeated:
        if field.type == FieldDescriptor.TYPE_BOOL:
            return ANY
        if field.type == FieldDescriptor.TYPE_ENUM:
            known = frozenset(field.enum_type.values_by_number)
            return Only("one that this version knows", lambda value: value in known)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            return Part()
    raise ValueError(f"{field.full_name} has no rule")


@dataclass(frozen=True)
class Rules:
    """What messages may hold.

    Attributes:
        consistent: returns what is wrong between the fields of a message, in words; "" if nothing is.
    """

    fields: Mapping[type[Message], Mapping[str, Rule]]
    consistent: Mapping[type[Message], Callable[[Any], str]]

    def parse(self, kind: type[M], raw: bytes) -> M:
        """Parse and check a message of this kind. Raises BadMessage."""
        try:
            message = kind.FromString(raw)
        except DecodeError as error:
            raise BadMessage(f"{len(raw)} bytes that are no {kind.__name__}") from error
        self.check(message)
        return message

    def check(self, message: Message, where: str = "") -> None:
        """Raise BadMessage, naming the field, its value and what is allowed, unless all rules hold."""
        where = where or type(message).__name__
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
                self.check(value, where)
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
    """Whether each value is greater than the previous one."""
    return all(first < second for first, second in pairwise(values))


def _shown(value: Any) -> str:
    """A value in a form fit for an error message: short, and without characters that control a terminal."""
    text = f"{len(value)} bytes" if isinstance(value, bytes) else ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


RUN_CONFIG = 1 << 19
"""Most characters of a run's configuration: [program] may name thousands of tensors."""
REVOKED = 4096
"""Most revoked sites that a list names; these are the latest ones."""
COUNTS = 2**53
"""Upper bound of rounds, tokens and bytes: JSON and a double hold smaller whole numbers exactly."""
ELEMENTS = 2**40
"""Most elements of a vector: 4 TiB of fp32."""
MANIFEST_HASHES = 400_000
"""Most pieces of a state: 12.5 MB of hashes, for 400 GiB of state in pieces of 1 MiB."""

FRAGMENTS = 64
NODE_ID = re.compile("[0-9a-f]{16}")
LEDGER_KEY = re.compile("[0-9a-f]{16}(/[1-9][0-9]?)?")


def below(limit: int) -> Only:
    """Whole numbers below a limit."""
    return Only(f"below {limit}", lambda value: value < limit)


def text(most: int, breaks: str = "") -> Only:
    """Text without characters that control a terminal; `breaks` lists control characters that are allowed anyway."""
    spaces = str.maketrans(dict.fromkeys(breaks, " "))
    return Only(
        f"at most {most} printable characters",
        lambda value: len(value) <= most and value.translate(spaces).isprintable(),
    )


def size(least: int, most: int) -> Only:
    """A number of bytes from `least` to `most`."""
    span = f"{least}" if least == most else f"{least} to {most}"
    return Only(f"{span} bytes", lambda value: least <= len(value) <= most)


def or_empty(rule: Only) -> Only:
    """A value that the rule allows, or an empty one."""
    return Only(f"{rule.allowed}, or empty", lambda value: not value or rule.holds(value))


COUNT = below(COUNTS)
ELEMENT = below(ELEMENTS)
ANY = Only("anything", lambda _: True)
NODE = Only("a node id, 16 hex digits", lambda value: NODE_ID.fullmatch(value) is not None)
NODES = Many(NODE, SITES, ordered=True)
ENTRY = Only("a node id, or one with the number of a fragment", lambda value: LEDGER_KEY.fullmatch(value) is not None)
HASH = size(32, 32)
NONCE = size(1, 64)
SIGNATURE = size(8, 72)
REASON = text(4000, breaks="\n\t")
AMOUNT = Only("finite and not negative", lambda value: 0 <= value < math.inf)
LOSS = Only("finite, or NaN: none yet", lambda value: not math.isinf(value))
ADDRESS = Only("HOST:PORT, or multiaddrs", lambda value: is_address(value) or are_routes(value))
TENSORS = (ANCHOR, MOMENTUM, ADAM_M, ADAM_V)
TENSOR = Only(f"one of {', '.join(TENSORS)}", lambda value: value in TENSORS)
PADDING = size(0, CHUNK_BYTES)
VALUES = size(0, CHUNK_BYTES)
