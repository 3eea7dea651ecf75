"""A loaded pair: prompts and chats in, text and statistics out."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from time import perf_counter
from types import TracebackType
from typing import Literal, Self, Unpack

from lspec import aio
from lspec.adaptive import AdaptiveGamma
from lspec.chats import Chats
from lspec.controller import FixedGamma
from lspec.costs import Costs
from lspec.decoder import Decoder
from lspec.drafters import Drafter, HybridDrafter, LookupDrafter, ModelDrafter, NoDrafter
from lspec.errors import RequestError
from lspec.exact import ChunkedCache, ExactModel
from lspec.grammar import Grammars
from lspec.llama import LlamaModel
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
from lspec.round import MAX_GAMMA
from lspec.sampling import ChainSampler
from lspec.stats import Tally
from lspec.template import Message, Tool, Variables
from lspec.verify import RULES, Noise, RuleName

DrafterName = Literal["auto", "model", "ngram", "none"]

_LISTEN_S = 0.05  # between looks at should_stop, while another generation runs


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
        rule: RuleName,
        chat_template: str | None,
        template_args: Variables | None = None,
        widths: Sequence[int] | None = None,
    ) -> None:
        """`widths` are those that exact mode keeps to; None: any."""
        self._models = [target] if draft is None else [target, draft]
        if widths is None:
            self.target = TokenCache(target)
        else:
            self.target = ChunkedCache(ExactModel(target, widths))
        self.rule: RuleName = rule if widths is None else "coupled"
        self.exact = widths is not None
        self._widths = widths
        self.max_width = MAX_GAMMA + 1 if widths is None else max(widths)
        self.draft = None if draft is None else TokenCache(draft)
        self.vocab = target.vocab
        self.chat_template = chat_template or target.chat_template
        self.chats = Chats(self.chat_template, self.vocab, template_args or {})
        self._turn = threading.Lock()
        self._owner: int | None = None
        self.drafter = drafter
        self._lookup = LookupDrafter()
        self.gamma: Gamma = 0 if drafter == "none" else gamma
        self.n_ctx = target.n_ctx
        names = " + ".join(model.paths[0].stem for model in self._models)
        how = "plain decoding" if drafter == "none" else f"gamma {gamma}"
        self.description = f"{names}, {target.device}, {how}{', exact' if self.exact else ''}"

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
            draft = None if self.draft is None else self.draft.model
            return costs_of(self.target.model, draft, self._identity, widest=self.max_width)

    def _identity(self) -> object:
        return [self._widths, *(model.identity() for model in self._models)]

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.vocab)

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

    def require_open(self) -> None:
        """Raise RequestError after `close`."""
        self._models[0].require_open()

    @property
    def metadata(self) -> dict[str, str]:
        """The scalars of the target file's metadata, as texts."""
        self.require_open()
        return self._models[0].all_metadata()

    def forget(self) -> None:
        """Empty the caches: the next prompt is evaluated from its start."""
        with self._exclusive():
            self._forget()

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a raw prompt; the text of a control token is read as that token."""
        self.require_open()
        return self.vocab.tokenize(text, bos=True, special=True)

    def tokenize_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        template_args: Variables | None = None,
    ) -> list[int]:
        """Return the ids of the prompt that the chat template makes. Raises RequestError."""
        self.require_open()
        return self.chats.tokenize(messages, tools, template_args or {})

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

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        template_args: Variables | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Answer `messages`, mappings with "role" and "content", by the model's chat template.

        `tools` are functions in OpenAI's shape that the template shows to the model, and
        `template_args` its variables for this chat. The completion's `answer` is without thoughts.
        Raises RequestError, ContextOverflowError, DecodeError.
        """
        chunks = self.stream_chat(messages, tools=tools, template_args=template_args, **options)
        return _last(chunks)

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        template_args: Variables | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Chunk]:
        """Answer `messages` chunk by chunk; see `chat`. Closing the iterator ends it early."""
        prompt = self.tokenize_chat(messages, tools, template_args)
        return self._start(prompt, {"thoughts": True, **options})

    async def agenerate(
        self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]
    ) -> Completion:
        """`generate` for asyncio; cancelling its task ends it before the model's next pass."""
        return await aio.last(self.astream(prompt, **options))

    def astream(
        self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """`stream` for asyncio; see lspec.aio."""
        return aio.stream(self.stream, prompt, options)

    async def achat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        template_args: Variables | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """`chat` for asyncio; cancelling its task ends it before the model's next pass."""
        chunks = self.astream_chat(messages, tools=tools, template_args=template_args, **options)
        return await aio.last(chunks)

    def astream_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        template_args: Variables | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Chunk, None]:
        """`stream_chat` for asyncio; see lspec.aio."""
        start = partial(self.stream_chat, tools=tools, template_args=template_args)
        return aio.stream(start, messages, options)

    def _start(self, prompt: Sequence[int], options: RequestOptions) -> Iterator[Chunk]:
        request = check_request(
            prompt,
            options,
            n_ctx=self.n_ctx,
            n_vocab=self.target.model.n_vocab,
            gamma=self.gamma,
            rule=self.rule,
        )
        if self.exact and request.rule != "coupled":
            raise RequestError("exact mode has a rule of its own", hint="Leave out the rule.")
        thoughts = self.chats.thoughts(request.prompt) if request.thoughts else None
        if request.response_format is not None:
            constraint = self._grammars.constraint(request.response_format)
            if constraint and thoughts and thoughts.thinking:
                constraint = self.chats.after_thought(constraint)
            request = replace(request, constraint=constraint)
        return self._run(request, Answer(request, self.vocab.piece, thoughts))

    def _run(self, request: Request, answer: Answer) -> Iterator[Chunk]:
        """Play `request`. The time between chunks is the consumer's and is not counted."""
        if request.gamma == "auto":
            _ = self._adaptive  # measures before the request takes its turn
        with self._exclusive(request.should_stop) as mine:
            tally = Tally(
                exact=self.exact,
                rule=request.rule,
                gamma=request.gamma,
                prompt_tokens=len(request.prompt),
            )
            decoder = self._decoder(request) if mine else None
            if decoder and self._prefill(decoder, request, tally):
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
        gamma = request.gamma
        sampler = ChainSampler(
            request.sampling,
            n_vocab=self.target.model.n_vocab,
            text=request.prompt,
            constraint=request.constraint,
        )
        plain = self.drafter == "none" or gamma == 0
        return Decoder(
            target=self.target,
            drafter=NoDrafter() if plain else self._choose_drafter(request, sampler),
            sampler=sampler,
            rule=RULES[request.rule](Noise(request.seed)),
            controller=self._adaptive if gamma == "auto" else FixedGamma(gamma),
            ends=self.vocab.ends,
            max_drafted=0 if plain else self.max_width - 1,
            top_logprobs=request.logprobs,
        )

    def _choose_drafter(self, request: Request, sampler: ChainSampler) -> Drafter:
        """Choose by name; "auto" copies as well where the controller can tell when that pays."""
        if self.drafter == "ngram" or self.draft is None:
            return self._lookup
        shared = min(self.target.model.n_vocab, self.draft.model.n_vocab)
        model = ModelDrafter(self.draft, sampler.for_draft(shared), ends=self.vocab.ends)
        if self.drafter == "auto" and request.gamma == "auto":
            return HybridDrafter(self._lookup, model)
        return model

    @contextmanager
    def _exclusive(self, should_stop: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Hold the engine for a whole generation; other threads wait.

        Yields False to a caller that is told to stop while it waits.
        """
        if not self._turn.acquire(blocking=False):
            if self._owner == threading.get_ident():
                raise RequestError(
                    "this engine is in the middle of a stream",
                    hint="Read the stream to its end, or close it, before asking again.",
                )
            while not self._turn.acquire(timeout=_LISTEN_S):
                if should_stop():
                    yield False
                    return
        self._owner = threading.get_ident()
        try:
            yield True
        finally:
            self._owner = None
            self._turn.release()


def _last(chunks: Iterator[Chunk]) -> Completion:
    completion = None
    for chunk in chunks:
        completion = chunk.completion
    assert completion is not None
    return completion
