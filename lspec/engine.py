"""A loaded pair: prompts and chats in, text and statistics out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from time import perf_counter
from types import TracebackType
from typing import Literal, Self, Unpack

from lspec.adaptive import AdaptiveGamma
from lspec.controller import FixedGamma
from lspec.costs import Costs
from lspec.decoder import Decoder
from lspec.drafters import Drafter, HybridDrafter, LookupDrafter, ModelDrafter, NoDrafter
from lspec.errors import RequestError
from lspec.llama import LlamaModel, chat_renderer
from lspec.measured import costs_of
from lspec.model import TokenCache
from lspec.request import (
    Answer,
    Chunk,
    Completion,
    Gamma,
    Request,
    RequestOptions,
    check_request,
)
from lspec.sampling import TruncatingSampler
from lspec.stats import Tally
from lspec.template import Message, tokenize_chat
from lspec.verify import Noise, RejectionRule

DrafterName = Literal["auto", "model", "ngram", "none"]


class Engine:
    """A target, maybe with a draft. Create it with `lspec.load`; one generation runs at a time.

    Callers in other threads wait for their turn. The caches stay between calls: a prompt that
    begins like the last text is evaluated only from where it differs.

    `target` and `draft` are the models with their caches, `vocab` the target's vocabulary: for
    measuring, while no generation runs.
    """

    def __init__(
        self,
        target: LlamaModel,
        draft: LlamaModel | None,
        *,
        gamma: Gamma,
        drafter: DrafterName,
        chat_template: str | None,
    ) -> None:
        self._models = [target] if draft is None else [target, draft]
        self.target = TokenCache(target)
        self.draft = None if draft is None else TokenCache(draft)
        self.vocab = target.vocab
        template = chat_template or target.chat_template
        self._render = chat_renderer(template, self.vocab) if template else None
        self._turn = threading.Lock()
        self._owner: int | None = None
        self.drafter = drafter
        self._lookup = LookupDrafter()
        self.gamma: Gamma = 0 if drafter == "none" else gamma
        self.n_ctx = target.n_ctx
        names = " + ".join(model.paths[0].stem for model in self._models)
        how = "plain decoding" if drafter == "none" else f"gamma {gamma}"
        self.description = f"{names}, {target.device}, {how}"

    def close(self) -> None:
        """Free both models, after the generation of another thread if there is one."""
        mine = self._owner == threading.get_ident()
        if not mine:
            self._turn.acquire()
        for model in self._models:
            model.close()
        if not mine:
            self._turn.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @cached_property
    def costs(self) -> Costs:
        """What passes cost on this machine, measured now or remembered; empties the caches."""
        with self._exclusive():
            self._forget()
            return costs_of(self._models[0], self._models[1] if self._models[1:] else None)

    @cached_property
    def _adaptive(self) -> AdaptiveGamma:
        """The controller of all requests whose gamma is "auto": it learns over the session."""
        return AdaptiveGamma(self.costs)

    def why_no_draft(self) -> str | None:
        """Return in numbers why gamma "auto" leaves the draft model alone; None if it does not."""
        c = self.costs.cost_coefficient
        if c is None or self._adaptive.pays_at_best():
            return None
        return (
            f"the draft model is off: a verify pass of 5 costs {self.costs.verify_cost(4):.1f} "
            f"single steps on this machine, and a draft step {c:.2f}"
        )

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a raw prompt; the text of a control token is read as that token."""
        self._models[0].require_open()
        return self.vocab.tokenize(text, bos=True, special=True)

    def tokenize_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of the prompt that the chat template makes. Raises RequestError."""
        self._models[0].require_open()
        if self._render is None:
            raise RequestError(
                "this model has no chat template",
                hint="Use `lspec generate`, or give a template with --chat-template FILE.",
            )
        return tokenize_chat(messages, self.vocab, render=self._render)

    def generate(
        self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]
    ) -> Completion:
        """Continue `prompt`, a text or token ids, without a chat template.

        Raises RequestError, ContextOverflowError, DecodeError.
        """
        return _last(self.stream(prompt, **options))

    def stream(
        self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]
    ) -> Iterator[Chunk]:
        """Continue `prompt` chunk by chunk; see `generate`. Closing the iterator ends it early."""
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else prompt
        return self._start(tokens, options)

    def chat(self, messages: Sequence[Message], **options: Unpack[RequestOptions]) -> Completion:
        """Answer `messages`, mappings with "role" and "content", by the model's chat template.

        Raises RequestError, ContextOverflowError, DecodeError.
        """
        return _last(self.stream_chat(messages, **options))

    def stream_chat(
        self, messages: Sequence[Message], **options: Unpack[RequestOptions]
    ) -> Iterator[Chunk]:
        """Answer `messages` chunk by chunk; see `chat`. Closing the iterator ends it early."""
        return self._start(self.tokenize_chat(messages), options)

    def _start(self, prompt: Sequence[int], options: RequestOptions) -> Iterator[Chunk]:
        request = check_request(
            prompt, options, n_ctx=self.n_ctx, n_vocab=self.target.model.n_vocab, gamma=self.gamma
        )
        return self._run(request, Answer(request, self.vocab.piece))

    def _run(self, request: Request, answer: Answer) -> Iterator[Chunk]:
        """Play `request`. The time between chunks is the consumer's and is not counted."""
        if request.gamma == "auto":
            _ = self._adaptive  # measures before the request takes its turn
        with self._exclusive():
            tally = Tally(prompt_tokens=len(request.prompt))
            decoder = self._decoder(request)
            if self._prefill(decoder, request, tally):
                started = perf_counter()
                for round in decoder.rounds(
                    request.prompt, max_tokens=request.max_tokens, should_stop=request.should_stop
                ):
                    tally.add(round)
                    chunk = answer.add(round)
                    tally.total_s += perf_counter() - started
                    yield chunk
                    if answer.complete:
                        break
                    started = perf_counter()
            yield answer.finish(tally)

    def _prefill(self, decoder: Decoder, request: Request, tally: Tally) -> bool:
        started = perf_counter()
        if not request.reuse:
            self._forget()
        tally.reused_tokens = self.target.reuse(request.prompt[:-1])
        finished = decoder.prefill(request.prompt, request.should_stop)
        tally.prompt_s = perf_counter() - started
        return finished

    def _forget(self) -> None:
        for cache in filter(None, (self.target, self.draft)):
            cache.truncate(0)

    def _decoder(self, request: Request) -> Decoder:
        target = self.target.model
        gamma = request.gamma
        controller = self._adaptive if gamma == "auto" else FixedGamma(gamma)
        return Decoder(
            target=self.target,
            drafter=self._choose_drafter(request),
            sampler=TruncatingSampler(request.sampling, n_vocab=target.n_vocab),
            rule=RejectionRule(Noise(request.seed)),
            controller=controller,
            ends=self.vocab.ends,
        )

    def _choose_drafter(self, request: Request) -> Drafter:
        """Choose by name; "auto" copies as well where the controller can tell when that pays."""
        if self.drafter == "none" or request.gamma == 0:
            return NoDrafter()
        if self.drafter == "ngram" or self.draft is None:
            return self._lookup
        shared = min(self.target.model.n_vocab, self.draft.model.n_vocab)
        sampler = TruncatingSampler(request.sampling, n_vocab=shared)
        model = ModelDrafter(self.draft, sampler, ends=self.vocab.ends)
        if self.drafter == "auto" and request.gamma == "auto":
            return HybridDrafter(self._lookup, model)
        return model

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the engine for a whole generation; other threads wait."""
        if not self._turn.acquire(blocking=False):
            if self._owner == threading.get_ident():
                raise RequestError(
                    "this engine is in the middle of a stream",
                    hint="Read the stream to its end, or close it, before asking again.",
                )
            self._turn.acquire()
        self._owner = threading.get_ident()
        try:
            yield
        finally:
            self._owner = None
            self._turn.release()


def _last(chunks: Iterator[Chunk]) -> Completion:
    completion = None
    for chunk in chunks:
        completion = chunk.completion
    assert completion is not None
    return completion
