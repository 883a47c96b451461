"""What files by hand say about themselves is in test_config.py."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError, model_validator

from pier_node.base.toml import first_problem


class Part(BaseModel):
    size: int


class Whole(BaseModel):
    parts: list[Part]

    @model_validator(mode="after")
    def _has_parts(self) -> Whole:
        assert self.parts, "no parts"
        return self


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"parts": [{"size": 1}, {"size": "x"}]}, r"parts\.1\.size: .*integer"),
        ({"parts": []}, "the file: .*no parts"),
    ],
)
def test_the_key_and_what_is_wrong_with_it(given: object, said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Whole.model_validate(given)
    with pytest.raises(ValueError, match=said):
        raise ValueError(first_problem(refused.value, "the file"))
