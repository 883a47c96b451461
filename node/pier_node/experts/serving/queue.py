"""Schedules requests to the experts: which experts answer, in what order work is computed, and within which limits.

One thread does all computation, alternating between answers token by token. With top-k, all experts read the prompt one
after the other, and the likeliest ones answer. The others cost nothing from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from pier_node.experts.mixture import Rule, rule
from pier_node.experts.serving.answer import Answer
from pier_node.experts.serving.mixture_decoder import Heard, MixtureDecoder, NoExperts, likeliest
from pier_node.experts.serving.models import Expert, Lost, Pool, even_prior
from pier_node.experts.serving.request import CompletionRequest, Refusal
from pier_node.trainer.data.tokens import Tokenizer

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
    """An ensemble that answers requests.

    Args:
        name: model name of the ensemble.
        mixing: the rule that updates the experts' weights.
        top_k: number of experts that answer a request; 0: all.
    """

    def __init__(
        self,
        name: str,
        experts: Sequence[Expert],
        tokenizer: Tokenizer,
        pool: Pool,
        mixing: Rule,
        top_k: int = 0,
        limits: Limits = Limits(),
    ) -> None:
        self.name, self.experts, self.pool, self.limits = name, experts, pool, limits
        self._tokenizer, self._mixing, self._top_k = tokenizer, mixing, top_k
        self._prior = even_prior(experts)
        self._thread = ThreadPoolExecutor(1, "experts")
        self._in_work = 0

    @property
    def models(self) -> list[str]:
        """The available models by name: the ensemble, and each expert that is not lost."""
        return [self.name, *(self.experts[index].name for index in self.pool.alive)]

    @asynccontextmanager
    async def begin(self, request: CompletionRequest) -> AsyncIterator[Answer]:
        """The answer to a request, once the prompt is read. Raises Refusal."""
        candidates, ids = self._candidates(request.model), self._prompt(request)
        if self._in_work >= self.limits.at_once:
            raise Refusal(429, f"{self._in_work} requests are in work; try again", "rate_limit_exceeded", None, 1)
        self._in_work += 1
        try:
            async with asyncio.timeout(self.limits.seconds), self._speakers(candidates, ids) as speakers:
                yield Answer(request, ids, speakers, self.experts, self._tokenizer)
        except TimeoutError:
            raise Refusal(504, f"not done within {self.limits.seconds:g} s; ask for less", "timeout") from None
        except NoExperts:
            raise Refusal(503, "no expert is left that can be read; the log says why", "no_experts") from None
        finally:
            self._in_work -= 1

    async def compute(self, work: Callable[..., T], *args: Any) -> T:
        """Run a function in the compute thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def close(self) -> None:
        """Stop computing."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def _speakers(self, candidates: list[int], ids: list[int]) -> AsyncIterator[MixtureDecoder]:
        heard: dict[int, Heard] = {}
        if self._top_k and self._top_k < len(candidates):
            for expert in candidates:
                async with self.pool.reserved([expert]):
                    heard.update(await self._hear([expert], ids))
            candidates = await self.compute(likeliest, self._prior, heard, CHOOSING, self._top_k)
        async with self.pool.reserved(candidates):
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
            problem = f"there is no model {model[:64]!a}; there are: {', '.join(self.models)}"
            raise Refusal(404, problem, "model_not_found", "model")
        return found

    def _prompt(self, request: CompletionRequest) -> list[int]:
        text = request.text
        ids = [int(id) for id in self._tokenizer.encode(text)] if isinstance(text, str) else list(text)
        if request.max_tokens > self.limits.made:
            raise Refusal(400, f"max_tokens: {self.limits.made} at most", None, "max_tokens")
        if len(ids) > self.limits.prompt:
            problem = f"the prompt has {len(ids)} tokens; {self.limits.prompt} at most"
            raise Refusal(400, problem, "context_length_exceeded", "prompt")
        vocabulary = self.experts[0].config.vocab_size
        if any(id >= vocabulary for id in ids):
            raise Refusal(400, f"prompt: tokens are below {vocabulary}", None, "prompt")
        return ids or self._beginning()

    def _beginning(self) -> list[int]:
        """The token before a text, from which an empty prompt continues."""
        separator = self._tokenizer.separator
        return [separator] if separator is not None else [int(id) for id in self._tokenizer.encode("\n")]
