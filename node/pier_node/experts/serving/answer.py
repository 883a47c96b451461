"""One answer as it is made: the prompt, if it is to be repeated, and then a token after the other.

Which token comes next: temperature, and the smallest set that has so much of the probability (Holtzman, 2020).

What may be told of a text that is being made: all but an end that could become one of its stop sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pier_node.experts.mixture import Array
from pier_node.experts.serving.mixture_decoder import MixtureDecoder
from pier_node.experts.serving.models import Expert
from pier_node.experts.serving.request import CompletionRequest
from pier_node.trainer.data.tokens import BROKEN, Spelling, Tokenizer


def pick(log_probs: Array, temperature: float, top_p: float, random: np.random.Generator) -> int:
    """A token.

    Args:
        log_probs: [vocab].
        temperature: 0: the likeliest one, among equals the first; 1: as the distribution says.
        top_p: draw among the likeliest tokens that together have this much, after the temperature.
    """
    if temperature == 0:
        return int(log_probs.argmax())
    # Taking the maximum away first keeps a temperature near 0 from overflowing.
    with np.errstate(over="ignore"):
        chances = np.exp((log_probs - log_probs.max()) / temperature)
    chances /= chances.sum()
    if top_p < 1:
        order = np.argsort(-chances, kind="stable")
        before = np.cumsum(chances[order]) - chances[order]
        chances[order[1:][before[1:] >= top_p]] = 0.0
        chances /= chances.sum()
    return int(random.choice(len(chances), p=chances))


def top(log_probs: Array, count: int) -> list[int]:
    """The `count` likeliest tokens, the likeliest first."""
    return [int(token) for token in np.argsort(-log_probs, kind="stable")[:count]]


@dataclass(frozen=True)
class Token:
    """A token of an answer, or of its prompt.

    Attributes:
        text: what it adds to the text; "" for the first bytes of a character, which comes with its last one.
        log_prob: that the mixture gave it; None for the first one of a prompt, which nothing predicts.
        top: the likeliest tokens at its place, text: log p; None where they were not asked for.
        parts: how much of its probability came from whom, expert: part, with sum 1; empty where nothing predicted it.
    """

    text: str
    log_prob: float | None = None
    top: dict[str, float] | None = None
    parts: dict[str, float] = field(default_factory=dict)


class Telling:
    """Lets tokens through as soon as no stop sequence can begin in them.

    Attributes:
        stopped: a stop sequence has come. It is not told, nor what follows it.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stopped = False
        self._stops = stops
        self._held: list[Token] = []

    def push(self, token: Token) -> list[Token]:
        """One token more; returns those that may be told now."""
        self._held.append(token)
        text = "".join(held.text for held in self._held)
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._cut(min(found))
        return self._release(len(text) - self._open_end(text))

    def end(self) -> list[Token]:
        """No token comes any more: the rest."""
        held, self._held = self._held, []
        return held

    def _open_end(self, text: str) -> int:
        """Characters at the end that a stop sequence begins with."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _release(self, safe: int) -> list[Token]:
        told, length = 0, 0
        for held in self._held:
            length += len(held.text)
            if length > safe:
                break
            told += 1
        released, self._held = self._held[:told], self._held[told:]
        return released

    def _cut(self, end: int) -> list[Token]:
        told: list[Token] = []
        for held in self.end():
            if end <= 0:
                break
            told.append(replace(held, text=held.text[:end]))
            end -= len(held.text)
        return told


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
        speakers: MixtureDecoder,
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
