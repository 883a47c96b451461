from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pier_node.base.errors import PierError
from pier_node.experts.report import evaluated, experts_of, gather
from pier_node.experts.sheet import Sheet, Subject, row_hashes
from pier_node.trainer.data.sources import Split


def sheet(expert: str, domain: str, split: Split, value: float, rows: int = 4, weights: str = "a") -> Sheet:
    texts = np.arange(rows * 9, dtype=np.uint8).reshape(rows, 9) + (100 if split == "prior" else 0)
    subject = Subject(expert=expert, weights=weights * 64, domain=domain, split=split)
    return Sheet(subject, np.full((rows, 8), value, dtype=np.float32), row_hashes(texts))


def sheets() -> list[Sheet]:
    """Each expert is better on its own domain; nobody has one for "other"."""
    values = {("a", "a"): -1.0, ("a", "b"): -4.0, ("b", "a"): -3.0, ("b", "b"): -2.0}
    splits: tuple[Split, Split] = ("prior", "test")
    return [
        sheet(expert, domain, split, values.get((expert, domain), -3.5), weights=expert)
        for expert in "ab"
        for domain in ("a", "b", "other")
        for split in splits
    ]


def test_experts_are_in_the_order_in_which_they_come() -> None:
    assert experts_of(sheets()) == ["a", "b"]
    assert experts_of(sheets()[::-1]) == ["b", "a"]


def test_every_domain_has_what_all_experts_gave_it() -> None:
    found = gather(sheets())
    assert list(found) == ["a", "b", "other"]
    assert found["b"].test.shape == (2, 4, 8)
    assert found["b"].test[:, 0, 0].tolist() == [-4.0, -2.0]
    assert found["b"].test_rows.tolist() != found["b"].prior_rows.tolist()


Change = Callable[[list[Sheet]], list[Sheet]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda all_of: all_of[:-1], "the expert of b was not scored on test rows of other"),
        (lambda all_of: [each for each in all_of if each.subject.split != "prior"], "not scored on prior rows of a"),
        (lambda all_of: [*all_of[:-1], sheet("b", "other", "test", -3.5, 5, "b")], "unlike test rows of other"),
        (lambda all_of: [*all_of, sheet("a", "c", "test", -1.0, weights="f")], "two experts of a were scored"),
    ],
)
def test_what_does_not_fit_together_is_said(change: Change, said: str) -> None:
    with pytest.raises(PierError, match=said):
        evaluated(change(sheets()))


def test_a_report_has_every_domain_and_their_mean() -> None:
    report = evaluated(sheets())
    assert report.experts == ["a", "b"]
    own = {domain: result.experts for domain, result in report.domains.items()}
    assert own["a"] == pytest.approx([1 / np.log(2), 3 / np.log(2)])
    assert [report.domains[domain].single for domain in "ab"] == [0, 1]
    names = list(report.mean)
    assert names == [
        "decay",
        "fixed-share",
        "bayes",
        "uniform",
        "top-1",
        "top-2",
        "single",
        "geometric",
    ]
    for name, standing in report.mean.items():
        each = [result.standings[name].bits_per_byte for result in report.domains.values()]
        assert standing.bits_per_byte == pytest.approx(np.mean(each))
    assert list(evaluated(sheets(), top_k=2).mean)[4:] == ["top-2", "single", "geometric"]
