"""What every table of a configuration file is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A table: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)
