"""One answer as it is made: the prompt, if it is to be repeated, and then a token after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pier_node.data.spelling import BROKEN, Spelling
from pier_node.data.tokens import Tokenizer
from pier_node.experts.weights import Array
from pier_node.serving.request import CompletionRequest
from pier_node.serving.sampling import pick, top
from pier_node.serving.shelf import Expert
from pier_node.serving.speakers import Speakers
from pier_node.serving.telling import Telling, Token


class Answer:
    """What a request gets.

    Attributes:
        prompt_tokens, made: how many there are; the token that ends a text counts.
        finish: why it ended: "stop" or "length"; "" before.
    """

    def __init__(
        self,
        request: CompletionRequest,
        ids: Sequence[int],
        speakers: Speakers,
        experts: Sequence[Expert],
        tokenizer: Tokenizer,
    ) -> None:
        self.prompt_tokens, self.made, self.finish = len(ids), 0, ""
        self._request, self._ids, self._speakers = request, ids, speakers
        self._experts, self._tokenizer = experts, tokenizer
        self._spelling = Spelling(tokenizer, [] if request.echo else ids)
        self._telling = Telling(request.stops)
        self._random = np.random.default_rng(None if request.seed is None else abs(request.seed))

    @property
    def posterior(self) -> dict[str, float]:
        """Weights of the experts for a token that would come next, by name."""
        return {
            self._experts[index].name: float(w) for index, w in zip(self._speakers.experts, self._speakers.posterior)
        }

    @property
    def flops_per_token(self) -> float:
        """Of those experts that speak."""
        return sum(self._experts[index].flops for index in self._speakers.experts)

    def echoed(self) -> list[Token]:
        """The prompt's tokens, where they were asked for."""
        if not self._request.echo:
            return []
        scores, parts = self._speakers.prompt_scores, self._speakers.prompt_parts
        told = [Token(self._spelling.push(self._ids[0]))]
        for at in range(1, len(self._ids)):
            whose = self._named(dict(zip(self._speakers.experts, parts[:, at].tolist())))
            told.append(Token(self._spelling.push(self._ids[at]), float(scores[at]), None, whose))
        return told

    def step(self) -> list[Token]:
        """Make one token more; returns those that may be told now. Raises NoExperts."""
        if self.made >= self._request.max_tokens:
            return self._end("length")
        log_probs = self._speakers.predict()
        id = pick(log_probs, self._request.temperature, self._request.top_p, self._random)
        self.made += 1
        ends = id == self._tokenizer.separator and self._tokenizer.fingerprint != "bytes"
        last = ends or self.made >= self._request.max_tokens
        parts = self._named(self._speakers.say(id, last))
        text = "" if ends else self._spelling.push(id)
        token = Token(text + (self._spelling.end() if last else ""), float(log_probs[id]), self._top(log_probs), parts)
        told = self._telling.push(token)
        if self._telling.stopped:
            self.finish = "stop"
        elif last:
            told += self._end("stop" if ends else "length")
        return told

    def _end(self, why: str) -> list[Token]:
        self.finish = why
        return self._telling.end()

    def _named(self, parts: Mapping[int, float]) -> dict[str, float]:
        return {self._experts[index].name: part for index, part in parts.items()}

    def _top(self, log_probs: Array) -> dict[str, float] | None:
        if not self._request.logprobs:
            return None
        return {self._shown(id): float(log_probs[id]) for id in top(log_probs, self._request.logprobs)}

    def _shown(self, id: int) -> str:
        """A token by itself; one that is only a part of a character by its number."""
        text = self._tokenizer.decode([id])
        return f"token_id:{id}" if BROKEN in text or not text else text
