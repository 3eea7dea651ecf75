"""The chats of one model: its template, and the thoughts that open its answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from lspec.errors import RequestError
from lspec.llama import Vocab, chat_renderer, variables_of
from lspec.sampling import Constraint
from lspec.template import (
    Message,
    Renderer,
    Tool,
    Variables,
    check_variables,
    tags,
    tokenize_chat,
)
from lspec.thinking import MARKERS, AfterThought, ThoughtStream, is_opened, style_of

_END = 32  # tokens of a prompt that show whether it has opened a thought


class Chats:
    """Makes prompts of messages, and tells what is thought in what is answered."""

    def __init__(self, template: str | None, vocab: Vocab, variables: Variables) -> None:
        """`variables` are the template's, for every chat. Raises RequestError."""
        check_variables(variables)
        self._vocab = vocab
        self._variables = variables
        self._template = template or ""
        self._render = chat_renderer(template, vocab) if template else None
        self._style = style_of(template)

    @cached_property
    def _spoken(self) -> tuple[str, ...]:
        """The tokens that the template uses as markers and the model writes as text."""
        return self._vocab.spoken({*tags(self._template), *MARKERS})

    def unread(self) -> list[str]:
        """Return the variables that were given and that the template does not read."""
        if not (self._variables and self._template):
            return []
        return sorted(self._variables.keys() - variables_of(self._template))

    def tokenize(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        variables: Variables | None = None,
        *,
        render: Renderer | None = None,
    ) -> list[int]:
        """Return the ids of the prompt; `variables` outrank those of every chat.

        `render` takes the place of the template. Raises RequestError.
        """
        render = render or self._render
        if render is None:
            raise RequestError(
                "this model has no chat template",
                hint="Use `lspec generate`, or give a template: chat_template=FILE.",
            )
        return tokenize_chat(
            messages,
            self._vocab,
            render=render,
            tools=tools,
            variables={**self._variables, **(variables or {})},
            spoken=self._spoken,
        )

    def thoughts(self, prompt: Sequence[int]) -> ThoughtStream:
        """Return what tells thought from answer behind `prompt`. Raises RequestError."""
        self._vocab.require_open()
        end = b"".join(self._vocab.piece(token, special=True) for token in prompt[-_END:])
        opened = is_opened(self._style, end.decode("utf-8", errors="replace"))
        return ThoughtStream(self._style, opened=opened)

    def after_thought(self, constraint: Constraint) -> Constraint:
        """Return `constraint` for the answer behind a thought that the prompt has opened."""
        ids = np.arange(self._vocab.n_tokens, dtype=np.int32)
        ends = np.array(sorted(self._vocab.ends), np.int32)
        return AfterThought(
            constraint,
            self._style,
            piece=self._vocab.piece,
            anything=np.setdiff1d(ids, ends, assume_unique=True),
        )
