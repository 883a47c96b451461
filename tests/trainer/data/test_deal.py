from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pier_node.trainer.data.documents import VALIDATION, Document, part_of

plain = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
documents = st.builds(Document, plain, plain)
fractions = st.floats(0.001, 0.5)
slots = st.integers(1, 1024)

# From `b2sum -l 128`, at validation = 0.25 and 7 slots.
GOLDEN = {
    Document("", ""): 6,
    Document("a.txt#0", "The quick brown fox\n"): VALIDATION,
    Document("a.txt#1", "The quick brown fox\n"): VALIDATION,
    Document("sub/b.md#0", "é 🙂"): 1,
}


@given(documents, fractions, slots)
def test_every_document_has_one_part(document: Document, validation: float, count: int) -> None:
    part = part_of(document, validation, count)
    assert part == VALIDATION or 0 <= part < count
    assert part == part_of(Document(*document), validation, count)


@given(documents, fractions, slots, slots)
def test_validation_is_the_same_whatever_the_slots(document: Document, validation: float, a: int, b: int) -> None:
    held_out = [part_of(document, validation, count) == VALIDATION for count in (a, b)]
    assert held_out[0] == held_out[1]


@given(documents, slots)
def test_a_larger_validation_part_only_takes(document: Document, count: int) -> None:
    small, large = (part_of(document, validation, count) for validation in (0.1, 0.4))
    assert large in (small, VALIDATION)


def test_parts_have_the_sizes_asked_for() -> None:
    many = [Document(f"{number}", "same text") for number in range(20_000)]
    sizes = Counter(part_of(document, 0.1, 4) for document in many)
    assert abs(sizes[VALIDATION] - 2000) < 200
    assert all(abs(sizes[slot] - 4500) < 300 for slot in range(4))


def test_name_and_text_both_decide() -> None:
    def parts(made: list[Document]) -> int:
        return len({part_of(document, 0.01, 1024) for document in made})

    assert parts([Document(f"{number}", "x") for number in range(20)]) > 10
    assert parts([Document("x", f"{number}") for number in range(20)]) > 10


def test_the_dealing_never_changes() -> None:
    assert {document: part_of(document, 0.25, 7) for document in GOLDEN} == GOLDEN


def test_a_file_name_that_is_not_utf8_can_be_dealt() -> None:
    assert 0 <= part_of(Document("caf\udce9#0", "x"), 1e-9, 3) < 3
