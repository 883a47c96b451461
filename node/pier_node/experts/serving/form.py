"""What an answer looks like as JSON: of a completion, and of a chat; complete, or in parts.

Three fields extend the protocol: `posterior` of a choice, the weights of its experts at the end; `posterior` in
`logprobs`, each expert's share of each token's probability; and `flops_per_token` of the answer. A chat has only the
first.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pier_node.experts.serving.generation import Answer, Token

Json = dict[str, Any]
Told = Mapping[Answer, Sequence[Token]]
"""Answers and their tokens, in order."""


class CompletionForm:
    """What all parts of one answer share.

    Args:
        model: name of the model.
        logprobs: whether they were requested.
    """

    kind, part_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, model: str, logprobs: bool) -> None:
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._logprobs = logprobs
        self._index, self._offset = -1, 0

    def whole(self, told: Told) -> Json:
        """All answers to a request, complete."""
        choices = [self._choice(tokens, answer) for answer, tokens in told.items()]
        flops = [*told][-1].flops_per_token
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage(told), "flops_per_token": flops}

    def part(self, tokens: Sequence[Token], answer: Answer) -> Json:
        """A part of an answer; the last one contains the finish reason."""
        return {**self._head, "object": self.part_kind, "choices": [self._part(tokens, answer)]}

    def counts(self, told: Told) -> Json:
        """The end of a stream, if its usage was requested."""
        return {**self._head, "object": self.part_kind, "choices": [], "usage": usage(told)}

    def _part(self, tokens: Sequence[Token], answer: Answer) -> Json:
        return self._choice(tokens, answer)

    def _choice(self, tokens: Sequence[Token], answer: Answer) -> Json:
        if answer.index != self._index:
            self._index, self._offset = answer.index, 0
        choice = {
            "index": answer.index,
            "text": "".join(token.text for token in tokens),
            "logprobs": self._logs(tokens) if self._logprobs else None,
            "finish_reason": answer.finish or None,
        }
        return {**choice, "posterior": answer.posterior} if answer.finish else choice

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


class ChatForm(CompletionForm):
    """The same for a chat."""

    kind, part_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _choice(self, tokens: Sequence[Token], answer: Answer) -> Json:
        choice = super()._choice(tokens, answer)
        message = {"role": "assistant", "content": choice.pop("text"), "refusal": None}
        return {**choice, "message": message}

    def _part(self, tokens: Sequence[Token], answer: Answer) -> Json:
        role = {} if answer.index == self._index else {"role": "assistant"}
        choice = super()._choice(tokens, answer)
        delta = {**role, "content": choice.pop("text")}
        return {**choice, "delta": delta}

    def _logs(self, tokens: Sequence[Token]) -> Json:
        return {
            "content": [
                {
                    **_log(token.text, token.log_prob or 0.0),
                    "top_logprobs": [_log(*each) for each in (token.top or {}).items()],
                }
                for token in tokens
            ],
            "refusal": None,
        }


def _log(text: str, log_prob: float) -> Json:
    return {"token": text, "logprob": log_prob, "bytes": [*text.encode()]}


def usage(told: Told) -> Json:
    """Token counts of a request: each prompt counts once."""
    prompts = {answer.prompt: answer.prompt_tokens for answer in told}
    asked, made = sum(prompts.values()), sum(answer.made for answer in told)
    return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}


def event(told: Json) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(told)}\n\n".encode()
