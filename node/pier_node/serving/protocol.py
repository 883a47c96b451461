"""Answers in the JSON of the completions protocol, whole or as server-sent events.

Fields that the protocol does not have: `posterior` of a choice, the weights of its experts at the end; `posterior` in
`logprobs`, for each token which part of its probability came from whom; `flops_per_token` of the answer.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from pier_node.serving.answer import Answer
from pier_node.serving.telling import Token

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


class Form:
    """What all parts of one answer have in common.

    Args:
        model: its name.
        logprobs: they were asked for.
    """

    def __init__(self, model: str, logprobs: bool) -> None:
        self._head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
        self._model, self._logprobs = model, logprobs
        self._offset = 0

    def whole(self, tokens: Sequence[Token], answer: Answer) -> Json:
        """The answer at once."""
        return {**self._told(tokens, answer), "usage": usage(answer), "flops_per_token": answer.flops_per_token}

    def part(self, tokens: Sequence[Token], answer: Answer) -> Json:
        """A part of it; the last one says why it ended."""
        return self._told(tokens, answer)

    def counts(self, answer: Answer) -> Json:
        """What a stream ends with, if its usage was asked for."""
        return {**self._head, "model": self._model, "choices": [], "usage": usage(answer)}

    def _told(self, tokens: Sequence[Token], answer: Answer) -> Json:
        choice: Json = {
            "index": 0,
            "text": "".join(token.text for token in tokens),
            "logprobs": self._logs(tokens) if self._logprobs else None,
            "finish_reason": answer.finish or None,
        }
        if answer.finish:
            choice["posterior"] = answer.posterior
        return {**self._head, "model": self._model, "choices": [choice]}

    def _logs(self, tokens: Sequence[Token]) -> Json:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": [token.top for token in tokens],
            "text_offset": offsets,
            "posterior": [token.parts for token in tokens],
        }


def usage(answer: Answer) -> Json:
    """Tokens of an answer."""
    total = answer.prompt_tokens + answer.made
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.made, "total_tokens": total}


def event(told: Json) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(told)}\n\n".encode()
