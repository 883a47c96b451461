"""Parses POST /v1/completions: checks its shape, its bounds and unsupported fields before any computation.

Source: the reference of the completions protocol (platform.openai.com/docs/api-reference/completions). Refusals have
the form that its clients expect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import from_json

INVALID = "invalid_request_error"


class Refusal(Exception):
    """A request that is refused.

    Args:
        status: HTTP status.
        message: what is wrong and what to do, for people.
        code: the same for programs.
        param: the field that is wrong.
        retry_after: seconds after which to try again; 0: not at all.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    def body(self) -> dict[str, Any]:
        """The refusal as JSON."""
        kind = INVALID if self.status < 500 and self.status != 429 else "rate_limit_error"
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def answer(self) -> web.Response:
        """The HTTP response."""
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after else None
        return web.json_response(self.body(), status=self.status, headers=headers)


MOST_STOPS, LONGEST_STOP = 4, 256
MOST_TOP = 5
NOT_DONE = "is not done here"

Count = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Ids = list[Count]


class StreamOptions(BaseModel):
    """What a stream contains besides its text."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """The request body. A null field counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: Annotated[str, Field(max_length=256)] = ""
    prompt: str | Ids | list[str] | list[Ids] = ""
    max_tokens: Count = 16
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] = Field(default_factory=list)
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: Annotated[str, Field(max_length=1024)] = ""
    n: Literal[1] = 1
    best_of: Literal[1] = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    suffix: str = ""

    @field_validator("presence_penalty", "frequency_penalty", "logit_bias", "suffix")
    @classmethod
    def check_unused(cls, value: Any) -> Any:
        """Refuse unsupported fields that would change the answer."""
        if value:
            raise ValueError(NOT_DONE)
        return value

    @field_validator("prompt")
    @classmethod
    def check_one(cls, prompt: str | Ids | list[str] | list[Ids]) -> str | Ids | list[str] | list[Ids]:
        """A list of prompts must have one entry."""
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) and len(prompt) > 1:
            raise ValueError("one prompt a request")
        return prompt

    @property
    def text(self) -> str | Ids:
        """The prompt itself: its text or its tokens."""
        if isinstance(self.prompt, str):
            return self.prompt
        first = self.prompt[0] if self.prompt else ""
        return [int(id) for id in self.prompt if isinstance(id, int)] if isinstance(first, int) else first

    @property
    def stops(self) -> list[str]:
        """The sequences at which the text ends."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


def parse(body: bytes) -> CompletionRequest:
    """Parse a request body. Raises Refusal."""
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Refusal(400, "the body is JSON, but not an object with fields")
    try:
        return CompletionRequest.model_validate({key: value for key, value in fields.items() if value is not None})
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> Refusal:
    errors = error.errors(include_url=False)
    # If a field may have several shapes, the error of the shape that it has says most.
    found = next((each for each in errors if not each["type"].endswith("_type")), errors[0])
    name = str(found["loc"][0]) if found["loc"] else ""
    if found["type"] == "extra_forbidden":
        return Refusal(400, f"unknown field {name[:64]!a}", "unknown_parameter", name[:64])
    if name in ("n", "best_of"):
        return Refusal(400, f"{name}: one answer a request; ask again, with another seed, for another", None, name)
    return Refusal(400, f"{name}: {found['msg'].removeprefix('Value error, ')}", None, name)
