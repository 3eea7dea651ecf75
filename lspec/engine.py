"""A loaded pair: prompts and chats in, text and statistics out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import TracebackType
from typing import NoReturn, Self, Unpack

from lspec import aio
from lspec.chats import Chats
from lspec.costs import Costs
from lspec.errors import RequestError
from lspec.grammar import Grammars
from lspec.llama import LlamaModel
from lspec.player import DrafterName, Player
from lspec.request import (
    Answer,
    Chunk,
    Completion,
    Gamma,
    RequestOptions,
    check_request,
)
from lspec.template import Message, Tool, Variables
from lspec.verify import RuleName


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
        self._player = Player(target, draft, drafter=drafter, widths=widths)
        self._streams = aio.Streams()
        self.target, self.draft = self._player.target, self._player.draft
        self.rule: RuleName = rule if widths is None else "coupled"
        self.exact = widths is not None
        self.max_width = self._player.max_width
        self.vocab = target.vocab
        self.chat_template = chat_template or target.chat_template
        self.chats = Chats(self.chat_template, self.vocab, template_args or {})
        self.drafter = drafter
        self.gamma: Gamma = 0 if drafter == "none" else gamma
        self.n_ctx = target.n_ctx
        names = " + ".join(model.paths[0].stem for model in self._player.models)
        how = "plain decoding" if drafter == "none" else f"gamma {gamma}"
        self.description = f"{names}, {target.device}, {how}{', exact' if self.exact else ''}"

    def close(self) -> None:
        """Free both models, after the generations of other threads and event loops.

        The streams of an event loop that runs in this thread end before their next pass.
        """
        self._streams.close(at_once=self._player.turn.mine)
        self._player.close()

    def __enter__(self) -> Self:
        self.require_open()
        return self

    def __repr__(self) -> str:
        return f"<lspec.Engine: {self.description}>"

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled."""
        raise TypeError("an engine cannot be copied or pickled: load another one")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def costs(self) -> Costs:
        """What passes cost on this machine, measured now or remembered; empties the caches."""
        return self._player.costs

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.vocab)

    def why_no_draft(self) -> str | None:
        """Return in numbers why gamma "auto" leaves the draft model alone; None if it does not."""
        return self._player.why_no_draft()

    def require_open(self) -> None:
        """Raise RequestError after `close`."""
        self.vocab.require_open()

    @property
    def metadata(self) -> dict[str, str]:
        """The scalars of the target file's metadata, as texts."""
        self.require_open()
        return self._player.models[0].all_metadata()

    def forget(self) -> None:
        """Empty the caches: the next prompt is evaluated from its start."""
        self._player.forget()

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
        return self.chats.tokenize(messages, tools, template_args)

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
        return self._streams.play(self.stream, prompt, options)

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
        return self._streams.play(start, messages, options)

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
        if self.drafter == "none":
            request = replace(request, gamma=0)  # and the statistics say so
        thoughts = self.chats.thoughts(request.prompt) if request.thoughts else None
        if request.response_format is not None:
            constraint = self._grammars.constraint(request.response_format)
            if constraint and thoughts and thoughts.thinking:
                constraint = self.chats.after_thought(constraint)
            request = replace(request, constraint=constraint)
        return self._player.play(request, Answer(request, self.vocab.piece, thoughts))


def _last(chunks: Iterator[Chunk]) -> Completion:
    completion = None
    for chunk in chunks:
        completion = chunk.completion
    assert completion is not None
    return completion
