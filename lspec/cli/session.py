"""A conversation: its messages and settings, and the commands that begin with a slash.

It talks through a `Screen`, so that whole sessions can be tested as transcripts.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal, Protocol

from lspec.cli.answer import LEGEND, remarks
from lspec.cli.settings import Settings
from lspec.engine import Engine
from lspec.errors import ContextOverflowError, LspecError, RequestError
from lspec.history import fit, room
from lspec.paths import reason, write_whole
from lspec.request import Chunk, Completion
from lspec.template import Message

HELP = """\
/help              this list
/clear             forget the conversation; the system message stays
/retry             another answer to the last message
/edit              change the last message in an editor and ask again
/system TEXT       set the system message; without TEXT remove it
/set               show the settings
/set NAME VALUE    change one, as in /set temperature 0; max-tokens and seed can be none
/stats             what the last answer cost
/drafts            show drafted tokens in green, or stop it
/save FILE         write the conversation to a file
/load FILE         continue one from a file
/bye               leave (or Ctrl-D)
//text             a message that begins with a slash
\"\"\"                begins and ends a message of several lines"""


_MOST_BYTES = 2**24  # of a saved conversation

Overflow = Literal["drop", "stop"]


class Screen(Protocol):
    """Where a session writes: the answer on one side, everything else on the other."""

    def play(self, start: Callable[..., Iterator[Chunk]], *, colour: bool) -> Completion:
        """Show the stream that `start(should_stop=...)` returns, and return the whole."""

    def note(self, text: str) -> None:
        """Show a remark."""

    def error(self, error: LspecError) -> None:
        """Show what went wrong and what to do."""

    def edit(self, text: str) -> str | None:
        """Let the user change `text`; None if he leaves it as it is."""


class Session:
    """The state of a chat and what each line of input does to it."""

    def __init__(
        self,
        engine: Engine,
        screen: Screen,
        *,
        options: dict[str, Any],
        system: str | None,
        overflow: Overflow,
    ) -> None:
        """`overflow` says what to do when the window is full: drop the oldest turns, or stop."""
        self._engine = engine
        self._screen = screen
        self._system = system
        self._turns: list[dict[str, str]] = []  # user and assistant messages
        self._dropped = 0  # how many of them, the oldest, the model does not see any more
        self._overflow = overflow
        self._asked: str | None = None  # the last message, for /retry and /edit
        self._joined = False  # whether it and its answer are the end of the history
        self._done: Completion | None = None
        self._settings = Settings(options, gamma=engine.gamma)
        self.show_drafts = False

    def handle(self, line: str) -> bool:
        """Do what `line` says; return False if it says goodbye."""
        try:
            if line.startswith("/") and not line.startswith("//"):
                return self._command(*_words(line))
            if text := line.removeprefix("/").strip() if line.startswith("//") else line.strip():
                self._ask(text)
        except LspecError as error:
            self._screen.error(error)
        return True

    def _ask(self, text: str, *, seed: int | None = None) -> None:
        """Answer `text` after the conversation so far; what came of it joins the history."""
        self._asked, self._joined = text, False
        question = {"role": "user", "content": text}
        seen = [*self._system_message(), *self._turns[self._dropped :], question]
        messages = self._make_room(seen)
        options = self._settings.options
        if seed is not None:
            options["seed"] = seed

        def start(**more: Any) -> Iterator[Chunk]:
            return self._engine.stream_chat(messages, **options, **more)

        done = self._screen.play(start, colour=self.show_drafts)
        self._done = done
        if done.answer:  # templates leave out what was thought before: so does this history
            self._turns += [question, {"role": "assistant", "content": done.answer}]
            self._joined = True
        for remark in remarks(done, n_ctx=self._engine.n_ctx):
            self._screen.note(remark)

    def _make_room(self, messages: list[dict[str, str]]) -> list[Message]:
        """Leave out the oldest turns if the window is full, or stop there; see lspec.history."""
        n_ctx, limit = self._engine.n_ctx, self._settings.max_tokens
        kept, turns = fit(messages, self._engine.tokenize_chat, n_ctx=n_ctx, max_tokens=limit)
        if turns and self._overflow == "stop":
            raise ContextOverflowError(
                f"the window of {n_ctx} tokens is full: less than {room(n_ctx, limit)} are left "
                "for an answer",
                hint="/clear starts a new conversation, /save FILE keeps this one. --ctx N makes "
                "the window larger, --overflow drop goes on without the oldest turns.",
            )
        if turns:
            self._dropped += len(messages) - len(kept)
            which = "oldest turn" if turns == 1 else f"{turns} oldest turns"
            self._screen.note(f"the window is full: the model forgets the {which}")
        return kept

    def _messages(self) -> list[dict[str, str]]:
        return [*self._system_message(), *self._turns]

    def _system_message(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system}] if self._system else []

    def _command(self, name: str, rest: str) -> bool:
        if name in ("bye", "exit", "quit"):
            return False
        command = getattr(self, f"_do_{name}", None)
        if command is None:
            known = [n.removeprefix("_do_") for n in dir(self) if n.startswith("_do_")]
            close = get_close_matches(name, [*known, "bye"], n=1)
            hint = f"Did you mean /{close[0]}?" if close else "/help lists the commands."
            raise RequestError(f"there is no command /{name}", hint=hint)
        command(rest)
        return True

    def _do_help(self, _: str) -> None:
        self._screen.note(HELP)

    def _do_clear(self, _: str) -> None:
        self._turns.clear()
        self._dropped = 0
        self._asked = self._done = None
        self._screen.note("forgotten")

    def _do_retry(self, _: str) -> None:
        asked = self._last_asked()
        seed = secrets.randbits(32) if self._done is None else self._done.seed + 1
        self._ask_again(asked, seed=seed)

    def _do_edit(self, _: str) -> None:
        changed = self._screen.edit(self._last_asked())
        if changed is None or not changed.strip():
            self._screen.note("unchanged")
            return
        self._ask_again(changed.strip())

    def _last_asked(self) -> str:
        if self._asked is None:
            raise RequestError("there is no message yet")
        return self._asked

    def _ask_again(self, text: str, *, seed: int | None = None) -> None:
        """Ask `text` in place of the last message; after an error all is as it was.

        The last exchange is no part of the history if its answer was empty.
        """
        before = self._asked, self._joined, self._dropped, list(self._turns)
        if self._joined:
            del self._turns[-2:]
        try:
            self._ask(text, seed=seed)
        except LspecError:
            self._asked, self._joined, self._dropped, self._turns = before
            raise

    def _do_system(self, text: str) -> None:
        self._system = text or None
        self._screen.note("system message set" if text else "no system message")

    def _do_set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if value:
            self._settings.change(name, value.strip())
        for line in [self._settings.line(name)] if name else self._settings.lines():
            self._screen.note(line)

    def _do_stats(self, _: str) -> None:
        if self._done is None:
            raise RequestError("there is no answer yet")
        for name, value in asdict(self._done.stats).items():
            self._screen.note(f"{name} {_shown(value)}")

    def _do_drafts(self, _: str) -> None:
        self.show_drafts = not self.show_drafts
        self._screen.note(LEGEND if self.show_drafts else "drafted tokens look like others")

    def _do_save(self, name: str) -> None:
        text = json.dumps({"messages": self._messages()}, ensure_ascii=False, indent=2)
        path = _path(name)
        try:
            replaced = path.exists()
            if replaced:
                _conversation(path)  # nothing else is overwritten
            write_whole(path, text + "\n")
        except OSError as error:
            raise RequestError(f"cannot write {path}: {reason(error)}") from None
        over = " over those that were there" if replaced else ""
        self._screen.note(f"saved {len(self._turns)} messages{over}")

    def _do_load(self, name: str) -> None:
        turns = _conversation(_path(name))
        self._system = turns.pop(0)["content"] if turns and turns[0]["role"] == "system" else None
        self._turns, self._dropped = turns, 0
        asked = [m["content"] for m in turns if m["role"] == "user"]
        self._asked = asked[-1] if asked else None
        self._joined = [m["role"] for m in turns[-2:]] == ["user", "assistant"]
        self._screen.note(f"loaded {len(turns)} messages")


def _conversation(path: Path) -> list[dict[str, str]]:
    """Return the messages of a saved conversation. Raises RequestError."""
    try:
        state = path.stat()
        if not S_ISREG(state.st_mode) or state.st_size > _MOST_BYTES:
            raise ValueError
        messages = json.loads(path.read_text(encoding="utf-8-sig"))["messages"]
        kept = [{k: m[k] for k in ("role", "content")} for m in messages]
        if not all(isinstance(text, str) for message in kept for text in message.values()):
            raise ValueError
        json.dumps(kept, ensure_ascii=False).encode()  # half a character is a ValueError
        return kept
    except OSError as error:
        raise RequestError(f"cannot read {path}: {reason(error)}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RequestError(f"{path} is not a saved conversation") from None


def _shown(value: object) -> str:
    """Return a value of the statistics as people write it."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in value.items()) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}"
    return "-" if value is None else str(value)


def _words(line: str) -> tuple[str, str]:
    name, _, rest = line[1:].strip().partition(" ")
    return name, rest.strip()


def _path(name: str) -> Path:
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise RequestError(f"nobody's home is known for {name}") from None
    if not path.name or "\0" in name:
        raise RequestError("a file name is missing", hint="/save FILE, /load FILE")
    return path
