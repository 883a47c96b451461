"""Client of the coordinator that runs with a folder on this machine; it talks to the coordinator's page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from pier_coordinator.identity.home import DAEMON_FILE, Home
from pier_node.base.errors import PierError

Answer = dict[str, Any]

ANSWER = 10.0
"""Timeout for an answer, in seconds."""

# A configured web proxy cannot reach this machine's own pages.
_opener = build_opener(ProxyHandler({}))


@dataclass(frozen=True)
class Client:
    """A running coordinator; `http` is the URL of its page, `address` is where sites reach it."""

    home: Home
    http: str
    address: str

    @classmethod
    def of(cls, folder: Path) -> Client:
        """The coordinator that runs with a folder. Raises PierError: none runs, or its daemon.json is damaged."""
        home, path = Home.found(folder), folder / DAEMON_FILE
        try:
            known = json.loads(path.read_bytes())
            return cls(home, Request(known["http"]).full_url, str(known["address"]))
        except FileNotFoundError as error:
            raise _not_running(folder) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PierError(
                f"{path} cannot be read: {error}",
                "Ask as the user that owns the folder. If the file is damaged, stop the coordinator if it runs, "
                f"and start it again: `pier-coordinator start {folder}` writes the file.",
            ) from error

    def get(self, path: str) -> Answer:
        """GET a path of the page. Raises PierError."""
        return self._ask(Request(self.http + path, headers=self._token()))

    def act(self, action: str, **body: Any) -> Answer:
        """Request an action. Raises PierError."""
        headers = {"Content-Type": "application/json", **self._token()}
        return self._ask(Request(f"{self.http}/api/actions/{action}", json.dumps(body).encode(), headers))

    def _token(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.home.operator}"}

    def _ask(self, request: Request) -> Answer:
        try:
            answer: HTTPResponse
            with _opener.open(request, timeout=ANSWER) as answer:
                return dict(json.load(answer))
        except HTTPError as error:
            raise PierError(f"the coordinator refuses: {_reason(error)}") from error
        except (OSError, ValueError, HTTPException) as error:
            timed_out = isinstance(getattr(error, "reason", error), TimeoutError)
            raise (_busy if timed_out else _not_running)(self.home.folder) from error


def _reason(error: HTTPError) -> str:
    text = error.read(10_000).decode(errors="replace")
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text.strip() or str(error.reason)


def _not_running(folder: Path) -> PierError:
    return PierError(f"no coordinator runs on {folder}", f"Start it: `pier-coordinator start {folder}`.")


def _busy(folder: Path) -> PierError:
    return PierError(
        f"the coordinator of {folder} did not answer within {ANSWER:g} s",
        "It may be busy, and may still do what it was asked. See whether it has before you ask again: "
        f"`pier-coordinator status --data {folder}`.",
    )
