"""A loaded pair: prompts and chats in, text and statistics out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType
from typing import Self, Unpack

from lspec.controller import FixedGamma
from lspec.decoder import Decoder
from lspec.drafters import Drafter, ModelDrafter, NoDrafter
from lspec.errors import RequestError
from lspec.llama import LlamaModel, chat_renderer
from lspec.model import TokenCache
from lspec.request import Answer, Chunk, Completion, Request, RequestOptions, check_request
from lspec.sampling import TruncatingSampler
from lspec.stats import Tally
from lspec.template import Message, tokenize_chat
from lspec.verify import Noise, RejectionRule


class Engine:
    """A target, maybe with a draft. Create it with `lspec.load`; one generation runs at a time.

    Callers in other threads wait for their turn. The caches stay between calls: a prompt that
    begins like the last text is evaluated only from where it differs.
    """

    def __init__(
        self, target: LlamaModel, draft: LlamaModel | None, *, gamma: int, chat_template: str | None
    ) -> None:
        self._models = [target] if draft is None else [target, draft]
        self._target = TokenCache(target)
        self._draft = None if draft is None else TokenCache(draft)
        self._vocab = target.vocab
        template = chat_template or target.chat_template
        self._render = chat_renderer(template, self._vocab) if template else None
        self._turn = threading.Lock()
        self._owner: int | None = None
        self.gamma = 0 if draft is None else gamma
        self.n_ctx = target.n_ctx
        names = " + ".join(m.metadata("general.name") or "unnamed" for m in self._models)
        how = f"gamma {gamma}" if draft else "plain decoding"
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

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a raw prompt; the text of a control token is read as that token."""
        self._models[0].require_open()
        return self._vocab.tokenize(text, bos=True, special=True)

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
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
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
        self._models[0].require_open()
        if self._render is None:
            raise RequestError(
                "this model has no chat template",
                hint="Use `lspec generate`, or give a template with --chat-template FILE.",
            )
        return self._start(tokenize_chat(messages, self._vocab, render=self._render), options)

    def _start(self, prompt: list[int], options: RequestOptions) -> Iterator[Chunk]:
        request = check_request(
            prompt, options, n_ctx=self.n_ctx, n_vocab=self._target.model.n_vocab, gamma=self.gamma
        )
        return self._run(request, Answer(request, self._vocab.piece))

    def _run(self, request: Request, answer: Answer) -> Iterator[Chunk]:
        """Play `request`. The time between chunks is the consumer's and is not counted."""
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
            for cache in filter(None, (self._target, self._draft)):
                cache.truncate(0)
        tally.reused_tokens = self._target.reuse(request.prompt[:-1])
        finished = decoder.prefill(request.prompt, request.should_stop)
        tally.prompt_s = perf_counter() - started
        return finished

    def _decoder(self, request: Request) -> Decoder:
        target, ends = self._target.model, self._vocab.ends
        rule = RejectionRule(Noise(request.seed))
        drafter: Drafter = NoDrafter()
        if self._draft is not None and request.gamma:
            shared = min(target.n_vocab, self._draft.model.n_vocab)
            sampler = TruncatingSampler(request.sampling, n_vocab=shared)
            drafter = ModelDrafter(self._draft, sampler, ends=ends)
        return Decoder(
            target=self._target,
            drafter=drafter,
            sampler=TruncatingSampler(request.sampling, n_vocab=target.n_vocab),
            rule=rule,
            controller=FixedGamma(request.gamma),
            ends=ends,
        )

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
