"""Schedules requests to a model or to experts, within limits, and generates their answers token by token.

One thread does all computation, alternating between answers token by token. With top-k, all experts read the prompt one
after the other, and the likeliest ones answer. The others cost nothing from then on.

A request may have several prompts and want several answers to each (`n`). They are made one after the other, so that a
request keeps the keys and values of two texts at most.

An answer is the echoed prompt, if requested, then one token after the other. Sampling uses a temperature and the
smallest set of tokens with enough probability (Holtzman, 2020). Text that could be the beginning of a stop sequence is
held back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from pier_node.experts.mixture import Array, Rule, rule
from pier_node.experts.serving.decoding import Heard, Lost, MixtureDecoder, NoExperts, Pool, likeliest
from pier_node.experts.serving.models import Expert, even_prior
from pier_node.experts.serving.request import MOST_CHOICES, Refusal, Request
from pier_node.experts.serving.tokenizer import ModelTokenizer
from pier_node.trainer.data.tokens import BROKEN, Spelling

PIECE = 256
"""Tokens of a prompt that are read at a time; other requests' tokens are computed in between."""
CHOOSING = rule("decay")
"""The rule that chooses experts, whatever mixes them afterwards: `uniform` would ignore the prompt."""

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Limits of a request.

    Attributes:
        prompt, made: tokens.
        at_once: concurrent requests; further ones are told to try again.
        seconds: time limit of a request.
        body: bytes.
    """

    prompt: int = 16_384
    made: int = 4_096
    at_once: int = 8
    seconds: float = 300.0
    body: int = 1 << 20


class Asking:
    """An ensemble or a single model that answers requests.

    Args:
        name: model name of the ensemble, or of the single model.
        mixing: the rule that updates the experts' weights.
        top_k: number of experts that answer a request; 0: all.

    Attributes:
        in_work: number of requests that are being answered.
    """

    def __init__(self, name: str, tokenizer: ModelTokenizer, pool: Pool, mixing: Rule, top_k: int) -> None:
        self.name, self.pool, self.limits = name, pool, Limits()
        self._tokenizer, self._mixing, self._top_k = tokenizer, mixing, top_k
        self._thread = ThreadPoolExecutor(1, "experts")
        self.in_work = 0

    @property
    def experts(self) -> Sequence[Expert]:
        """All experts that there ever were, by index."""
        return self.pool.experts

    @property
    def _prior(self) -> Array:
        return even_prior(self.experts)

    def speaks(self, tokenizer: ModelTokenizer, vocab_size: int) -> bool:
        """Whether a model with these tokens can be mixed with the experts."""
        same = tokenizer.fingerprint == self._tokenizer.fingerprint
        return same and vocab_size == self.experts[0].vocab_size

    def plug(self, expert: Expert, index: int | None) -> None:
        """Let an expert take part; see `Pool.plug`. Raises PierError: there is no room for it."""
        self.pool.check_room(self._top_k, expert, index)
        self.pool.plug(expert, index)

    @property
    def models(self) -> list[str]:
        """The available models by name: the ensemble, and each expert that is not lost."""
        return [*dict.fromkeys([self.name, *(self.experts[index].name for index in self.pool.alive)])]

    async def load(self) -> None:
        """Load the weights of one expert now, the first that can be loaded. Raises Lost: none can be."""
        while True:
            index = self.pool.alive[0]
            try:
                async with self.pool.reserved([index]):
                    await self.compute(self.pool.model, index)
                return
            except Lost:
                if not self.pool.alive:
                    raise

    @asynccontextmanager
    async def begin(self, request: Request) -> AsyncIterator[AsyncIterator[Answer]]:
        """The answers to a request, each once its prompt is read. Finish each before the next. Raises Refusal."""
        candidates = self._candidates(request.model)
        if self.in_work >= self.limits.at_once:
            raise Refusal(429, f"{self.in_work} requests are in work; try again", "rate_limit_exceeded", None, 1)
        self.in_work += 1
        try:
            async with asyncio.timeout(self.limits.seconds):
                # A long text takes a while, and a chat template is a program of whoever made the model.
                prompts = await asyncio.to_thread(request.prompts, self._tokenizer)
                self._check(request, prompts)
                async with aclosing(self._answers(request, candidates, prompts)) as all:
                    yield all
        except TimeoutError:
            raise Refusal(504, f"not done within {self.limits.seconds:g} s; ask for less", "timeout") from None
        except NoExperts:
            raise Refusal(503, "no expert is left that can be read; the log says why", "no_experts") from None
        finally:
            self.in_work -= 1

    async def _answers(
        self, request: Request, candidates: list[int], prompts: list[list[int]]
    ) -> AsyncGenerator[Answer, None]:
        for number, given in enumerate(prompts):
            ids = given or self._beginning()
            best = (request.best or 0) if request.echo else 0
            async with self._speakers(candidates, ids, best) as speakers:
                for choice in range(request.n):
                    last = choice == request.n - 1
                    own = speakers if last else await self.compute(speakers.fork)
                    yield Answer(request, number * request.n + choice, ids, own, self.experts, self._tokenizer)

    async def compute(self, work: Callable[..., T], *args: Any) -> T:
        """Run a function in the compute thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def close(self) -> None:
        """Stop computing."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def _speakers(self, candidates: list[int], ids: list[int], best: int) -> AsyncIterator[MixtureDecoder]:
        heard: dict[int, Heard] = {}
        if self._top_k and self._top_k < len(candidates):
            for expert in candidates:
                async with self.pool.reserved([expert]):
                    heard.update(await self._hear([expert], ids))
            candidates = await self.compute(likeliest, self._prior, heard, CHOOSING, self._top_k)
        async with self.pool.reserved(candidates):
            if best:  # the mixture's likeliest tokens of a prompt need what all experts predict at the same time
                fresh = {expert: Heard(self.pool, expert) for expert in candidates}
                speakers = MixtureDecoder(self._mixing, self._prior, fresh)
                for start in range(0, len(ids), PIECE):
                    await self.compute(speakers.read, ids[start : start + PIECE], best)
                yield speakers
                return
            heard = {expert: heard[expert] for expert in candidates} if heard else await self._hear(candidates, ids)
            yield await self.compute(MixtureDecoder, self._mixing, self._prior, heard)

    async def _hear(self, experts: Sequence[int], ids: list[int]) -> dict[int, Heard]:
        """Let experts read the prompt. Lost experts are left out."""
        heard = {expert: Heard(self.pool, expert) for expert in experts}
        for expert in experts:
            try:
                for start in range(0, len(ids), PIECE):
                    await self.compute(heard[expert].read, ids[start : start + PIECE])
            except Lost:
                del heard[expert]
        return heard

    def _candidates(self, model: str) -> list[int]:
        alive = self.pool.alive
        if model in ("", self.name):
            return alive
        found = [index for index in alive if self.experts[index].name == model]
        if not found:
            known = any(expert.name == model for expert in self.experts)
            problem = f"the expert of {model} does not answer now" if known else f"there is no model {model[:64]!a}"
            raise Refusal(404, f"{problem}; there are: {', '.join(self.models)}", "model_not_found", "model")
        return found

    def _check(self, request: Request, prompts: list[list[int]]) -> None:
        if request.max_tokens > self.limits.made:
            raise Refusal(400, f"max_tokens: {self.limits.made} at most", None, "max_tokens")
        if len(prompts) * request.n > MOST_CHOICES:
            raise Refusal(400, f"n: {MOST_CHOICES} answers a request at most, to all prompts together", None, "n")
        longest = max(map(len, prompts))
        if longest > self.limits.prompt:
            problem = f"the prompt has {longest} tokens; {self.limits.prompt} at most"
            raise Refusal(400, problem, "context_length_exceeded", "prompt")
        vocabulary = self.experts[0].vocab_size
        if any(id >= vocabulary for ids in prompts for id in ids):
            raise Refusal(400, f"prompt: tokens are below {vocabulary}", None, "prompt")

    def _beginning(self) -> list[int]:
        """The token before a text, from which an empty prompt continues."""
        separator = self._tokenizer.separator
        return [separator] if separator is not None else self._tokenizer.prompt("\n")


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
        begun = ((stop, length) for stop in self._stops for length in range(1, min(len(stop), len(text) + 1)))
        return max((length for stop, length in begun if text.endswith(stop[:length])), default=0)

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
    """An answer to a request.

    Attributes:
        index: its number in the request.
        prompt: number of the prompt that it answers.
        prompt_tokens, made: numbers of tokens; the token that ends a text counts.
        finish: why it ended: "stop" or "length"; "" before the end.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        ids: Sequence[int],
        speakers: MixtureDecoder,
        experts: Sequence[Expert],
        tokenizer: ModelTokenizer,
    ) -> None:
        self.index, self.prompt = index, index // request.n
        self.prompt_tokens, self.made, self.finish = len(ids), 0, ""
        self._request, self._ids, self._speakers = request, ids, speakers
        self._experts, self._tokenizer = experts, tokenizer
        self._spelling = Spelling(tokenizer, [] if request.echo else ids)
        self._telling = Telling(request.stops)
        self._random = np.random.default_rng(None if request.seed is None else [abs(request.seed), index % request.n])

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
        told = [Token(self._spelling.push(self._ids[0]))]
        for id, scored in zip(self._ids[1:], self._speakers.prompt[1:]):
            likeliest = self._tops(scored.top) if self._request.best else None
            told.append(Token(self._spelling.push(id), scored.log_prob, likeliest, self._named(scored.parts)))
        return told

    def step(self) -> list[Token]:
        """Generate a token. Returns the tokens that can be released now. Raises NoExperts."""
        if self.made >= self._request.max_tokens:
            return self._end("length")
        log_probs = self._speakers.predict()
        id = pick(log_probs, self._request.temperature, self._request.top_p, self._random)
        self.made += 1
        ends = id in self._tokenizer.ends
        last = ends or self.made >= self._request.max_tokens
        parts = self._named(self._speakers.say(id, last))
        text = "" if ends else self._spelling.push(id)
        best = self._request.best
        tops = self._tops([(it, float(log_probs[it])) for it in top(log_probs, best)]) if best else None
        token = Token(text + (self._spelling.end() if last else ""), float(log_probs[id]), tops, parts)
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

    def _tops(self, likeliest: Sequence[tuple[int, float]]) -> dict[str, float]:
        """By text. Of tokens with the same text, the likeliest counts."""
        found: dict[str, float] = {}
        for id, log_prob in likeliest:
            found.setdefault(self._shown(id), log_prob)
        return found

    def _shown(self, id: int) -> str:
        """A single token as text; one that is only part of a character as its number."""
        text = self._tokenizer.decode([id])
        return f"token_id:{id}" if BROKEN in text or not text else text
