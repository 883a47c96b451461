"""What is answered when there is no answer, as clients of the completions protocol expect it."""

from __future__ import annotations

from typing import Any

from aiohttp import web

INVALID = "invalid_request_error"


class Refusal(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP.
        message: what is wrong, and what to do, for people.
        code: the same for programs.
        param: the field that is wrong.
        retry_after: seconds after which it may be tried again; 0: not at all.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    def body(self) -> dict[str, Any]:
        """The JSON of it."""
        kind = INVALID if self.status < 500 and self.status != 429 else "rate_limit_error"
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def answer(self) -> web.Response:
        """The whole answer."""
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after else None
        return web.json_response(self.body(), status=self.status, headers=headers)
