"""The generation of one answer: the echoed prompt, if requested, then one token after the other.

Sampling uses a temperature and the smallest set of tokens with enough probability (Holtzman, 2020). Text that could be
the beginning of a stop sequence is held back.
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
    """Sample a token.

    Args:
        log_probs: [vocab].
        temperature: 0: the likeliest token, the first among equals; 1: the distribution unchanged.
        top_p: sample from the likeliest tokens that together have this probability, after the temperature.
    """
    if temperature == 0:
        return int(log_probs.argmax())
    # Subtracting the maximum first prevents overflow at temperatures near 0.
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
    """A token of an answer or of its prompt.

    Attributes:
        text: what it adds to the text; "" for the first bytes of a character, which appears with its last byte.
        log_prob: given by the mixture; None for the first token of a prompt, which nothing predicts.
        top: the likeliest tokens at its position, text: log p; None if not requested.
        parts: each expert's share of its probability, with sum 1; empty if nothing predicted it.
    """

    text: str
    log_prob: float | None = None
    top: dict[str, float] | None = None
    parts: dict[str, float] = field(default_factory=dict)


class Telling:
    """Releases tokens once no stop sequence can begin in them.

    Attributes:
        stopped: a stop sequence has occurred. Neither it nor the text after it is released.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stopped = False
        self._stops = stops
        self._held: list[Token] = []

    def push(self, token: Token) -> list[Token]:
        """Add a token. Returns the tokens that can be released now."""
        self._held.append(token)
        text = "".join(held.text for held in self._held)
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._cut(min(found))
        return self._release(len(text) - self._open_end(text))

    def end(self) -> list[Token]:
        """End of the text: returns the remaining tokens."""
        held, self._held = self._held, []
        return held

    def _open_end(self, text: str) -> int:
        """Number of characters at the end that begin a stop sequence."""
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
    """The answer to a request.

    Attributes:
        prompt_tokens, made: numbers of tokens; the token that ends a text counts.
        finish: why it ended: "stop" or "length"; "" before the end.
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
        """Weights of the experts for the next token, by name."""
        return {
            self._experts[index].name: float(w) for index, w in zip(self._speakers.experts, self._speakers.posterior)
        }

    @property
    def flops_per_token(self) -> float:
        """FLOPs of the active experts."""
        return sum(self._experts[index].flops for index in self._speakers.experts)

    def echoed(self) -> list[Token]:
        """The prompt's tokens, if requested."""
        if not self._request.echo:
            return []
        scores, parts = self._speakers.prompt_scores, self._speakers.prompt_parts
        told = [Token(self._spelling.push(self._ids[0]))]
        for at in range(1, len(self._ids)):
            whose = self._named(dict(zip(self._speakers.experts, parts[:, at].tolist())))
            told.append(Token(self._spelling.push(self._ids[at]), float(scores[at]), None, whose))
        return told

    def step(self) -> list[Token]:
        """Generate a token. Returns the tokens that can be released now. Raises NoExperts."""
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
        """A single token as text; one that is only part of a character as its number."""
        text = self._tokenizer.decode([id])
        return f"token_id:{id}" if BROKEN in text or not text else text
