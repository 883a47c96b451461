"""Parses POST /v1/completions and /v1/chat/completions: checks shape, bounds and unsupported fields first.

Source: the reference of OpenAI's protocol (platform.openai.com/docs/api-reference). Refusals have the form that its
clients expect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
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
MOST_CHAT_TOP = 20
MOST_PROMPTS, MOST_CHOICES = 64, 64
MOST_MESSAGES = 1024
CHAT_TOKENS = 512
"""Tokens of a chat's answer if the request sets no limit."""
NOT_DONE = "is not supported"

Count = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Ids = list[Count]
Chat = list[dict[str, str]]


class ToTokens(Protocol):
    """What a request needs of a tokenizer."""

    def prompt(self, text: str) -> list[int]:
        """The tokens of a prompt."""

    def chat(self, messages: Chat) -> list[int]:
        """The tokens of a chat, up to where the answer begins."""


class StreamOptions(BaseModel):
    """What a stream contains besides its text."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False


class Request(BaseModel):
    """The fields that both kinds of request have. A null field counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: Annotated[str, Field(max_length=256)] = ""
    max_tokens: Count = 16
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] = Field(default_factory=list)
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: Annotated[str, Field(max_length=1024)] = ""
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)

    @field_validator("presence_penalty", "frequency_penalty", "logit_bias")
    @classmethod
    def check_unused(cls, value: Any) -> Any:
        """Refuse unsupported fields that would change the answer."""
        if value:
            raise ValueError(NOT_DONE)
        return value

    @property
    def stops(self) -> list[str]:
        """The sequences at which the text ends."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def best(self) -> int | None:
        """How many of the likeliest tokens to report at each position; None: no log-probabilities at all."""
        raise NotImplementedError

    def prompts(self, tokenizer: ToTokens) -> list[list[int]]:
        """The tokens of each prompt."""
        raise NotImplementedError


class CompletionRequest(Request):
    """The body of POST /v1/completions."""

    prompt: str | Ids | list[str] | list[Ids] = ""
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    best_of: Literal[1] = 1
    suffix: Literal[""] = ""

    @field_validator("prompt")
    @classmethod
    def check_number(cls, prompt: str | Ids | list[str] | list[Ids]) -> str | Ids | list[str] | list[Ids]:
        """Bound the number of prompts."""
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) and len(prompt) > MOST_PROMPTS:
            raise ValueError(f"{MOST_PROMPTS} prompts a request at most")
        return prompt

    @property
    def best(self) -> int | None:
        """See Request."""
        return self.logprobs

    def prompts(self, tokenizer: ToTokens) -> list[list[int]]:
        """See Request."""
        given = self.prompt or ""
        several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        return [tokenizer.prompt(each) if isinstance(each, str) else [*each] for each in several]


class Part(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    def plain(self) -> dict[str, str]:
        """What a chat template gets."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content}


class ChatRequest(Request):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: Count = CHAT_TOKENS
    max_completion_tokens: Count | None = None  # the new name of max_tokens
    echo: Literal[False] = False
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_CHAT_TOP)] = 0
    response_format: Annotated[dict[str, Any], Field(max_length=8)] = Field(default_factory=dict)

    @field_validator("response_format")
    @classmethod
    def check_format(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Only text comes out."""
        if value.get("type", "text") != "text":
            raise ValueError(NOT_DONE)
        return value

    @model_validator(mode="before")
    @classmethod
    def name_limit(cls, fields: Any) -> Any:
        """Read max_completion_tokens as max_tokens."""
        if isinstance(fields, dict) and "max_completion_tokens" in fields:
            return {**fields, "max_tokens": fields["max_completion_tokens"]}
        return fields

    @property
    def best(self) -> int | None:
        """See Request."""
        return self.top_logprobs if self.logprobs else None

    def prompts(self, tokenizer: ToTokens) -> list[list[int]]:
        """See Request."""
        return [tokenizer.chat([message.plain() for message in self.messages])]


R = TypeVar("R", bound=Request)


def parse(body: bytes, kind: type[R]) -> R:
    """Parse a request body. Raises Refusal."""
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Refusal(400, "the body is JSON, but not an object with fields")
    try:
        return kind.model_validate({key: value for key, value in fields.items() if value is not None})
    except ValidationError as error:
        raise _refusal(error) from error


SHAPES = {"prompt": "a text, a list of tokens, or a list of several of either", "stop": "a text, or a list of texts"}
"""Fields that may have several shapes, and which."""


def _refusal(error: ValidationError) -> Refusal:
    errors = error.errors(include_url=False)
    # If a field may have several shapes, the error of the shape that it has says most.
    found = next((each for each in errors if not each["type"].endswith("_type")), errors[0])
    name = str(found["loc"][0]) if found["loc"] else ""
    if found["type"] == "extra_forbidden":
        return Refusal(400, f"unknown field {name[:64]!a}", "unknown_parameter", name[:64])
    if name in ("best_of", "suffix"):
        return Refusal(400, f"{name} {NOT_DONE}", None, name)
    if name in SHAPES and found["type"].endswith("_type"):
        return Refusal(400, f"{name}: give {SHAPES[name]}", None, name)
    return Refusal(400, f"{name}: {found['msg'].removeprefix('Value error, ')}", None, name)
