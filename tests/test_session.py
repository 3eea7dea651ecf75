"""Whole chat sessions as transcripts: `>>>` is what is typed, `!` a remark, `?` an error."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lspec.cli.session import Overflow, Session
from lspec.errors import ContextOverflowError, LspecError
from lspec.request import Chunk, Completion, FinishReason
from lspec.round import Source
from lspec.stats import Tally
from lspec.thinking import ThoughtStream, style_of


class ScriptedEngine:
    """Gives prepared answers in turn and remembers what it was asked.

    A character is a token. ^C ends an answer that was interrupted, ^L one that fills the window.
    """

    gamma = 4
    n_ctx = 4096

    def __init__(self, *answers: str | LspecError) -> None:
        self.answers = list(answers)
        self.asked: list[list[dict[str, str]]] = []
        self.options: list[dict[str, Any]] = []

    def tokenize_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [ord(c) for message in messages for c in message["content"]]

    def stream_chat(self, messages: list[dict[str, str]], **options: Any) -> Iterator[Chunk]:
        self.asked.append(messages)
        self.options.append(options)
        answer = self.answers.pop(0)
        if isinstance(answer, LspecError):
            raise answer
        end: FinishReason = "stop"
        if answer.endswith(("^C", "^L")):
            end = "interrupted" if answer.endswith("^C") else "length"
        text = answer.removesuffix("^C").removesuffix("^L")
        fills = answer.endswith("^L") and options.get("max_tokens", self.n_ctx) > len(text)
        prompt_tokens = self.n_ctx - len(text) if fills else 5
        completion = Completion(
            text=text,
            tokens=tuple(range(len(text))),
            finish_reason=end,
            stats=Tally(rounds=2, emitted=2 * len(text), prompt_tokens=prompt_tokens).stats(
                generated_tokens=len(text)
            ),
            seed=options.get("seed", 100),
            split=ThoughtStream(style_of(None)).finish(text),
        )
        yield Chunk(((text, Source.TARGET),), completion=completion)


class Paper:
    """A screen that writes a transcript."""

    def __init__(self, edited: str | None = None) -> None:
        self.lines: list[str] = []
        self.edited = edited
        self.colours: list[bool] = []

    def play(self, start: Callable[..., Iterator[Chunk]], *, colour: bool) -> Completion:
        *_, last = start(should_stop=lambda: False)
        assert last.completion is not None
        self.colours.append(colour)
        self.lines.append(last.completion.text)
        return last.completion

    def note(self, text: str) -> None:
        self.lines += [f"! {line}" for line in text.splitlines()]

    def error(self, error: LspecError) -> None:
        self.lines.append(f"? {error}{' / ' if error.hint else ''}{error.hint}")

    def edit(self, text: str) -> str | None:
        self.lines.append(f"! editing {text!r}")
        return self.edited


def check(
    engine: ScriptedEngine,
    transcript: str,
    *,
    edited: str | None = None,
    overflow: Overflow = "drop",
    **options: Any,
) -> Session:
    """Type the lines of `transcript` that begin with >>>; the rest must be what appears."""
    expected = textwrap.dedent(transcript).strip().splitlines()
    screen = Paper(edited)
    session = Session(
        engine,  # type: ignore[arg-type]
        screen,
        options=options,
        system=None,
        overflow=overflow,
    )
    said_goodbye = False
    for line in expected:
        if line.startswith(">>> "):
            assert not said_goodbye
            screen.lines.append(line)
            said_goodbye = not session.handle(line.removeprefix(">>> "))
    assert "\n".join(screen.lines) == "\n".join(expected)
    return session


def contents(messages: list[dict[str, str]]) -> list[str]:
    return [m["content"] for m in messages]


def test_conversation_carries_its_history() -> None:
    engine = ScriptedEngine("Hello.", "Fine.")
    check(
        engine,
        """
        >>> Hi
        Hello.
        >>> How are you?
        Fine.
        >>> /bye
        """,
    )
    assert contents(engine.asked[1]) == ["Hi", "Hello.", "How are you?"]


def test_interrupted_answer_stays_in_the_history_but_an_empty_one_does_not() -> None:
    engine = ScriptedEngine("Once upon^C", "^C", "Three.")
    session = check(engine, ">>> Tell\nOnce upon\n>>> More\n\n>>> Count\nThree.")
    assert contents(engine.asked[2]) == ["Tell", "Once upon", "Count"]
    assert session.handle("/bye") is False


def test_retry_takes_the_answer_back_and_another_seed() -> None:
    engine = ScriptedEngine("One.", "Two.", "Three.")
    check(engine, ">>> Say\nOne.\n>>> /retry\nTwo.\n>>> /retry\nThree.", seed=7)
    assert [o["seed"] for o in engine.options] == [7, 8, 9]
    assert all(contents(asked) == ["Say"] for asked in engine.asked)


def test_retry_asks_again_what_was_interrupted_before_its_first_word() -> None:
    engine = ScriptedEngine("A.", "^C", "B.")
    check(engine, ">>> one\nA.\n>>> two\n\n>>> /retry\nB.")
    assert contents(engine.asked[2]) == ["one", "A.", "two"]


def test_edit_replaces_the_last_message() -> None:
    engine = ScriptedEngine("A.", "B.")
    check(engine, ">>> helo\nA.\n>>> /edit\n! editing 'helo'\nB.", edited="hello\n")
    assert contents(engine.asked[1]) == ["hello"]


def test_edit_that_is_not_saved_changes_nothing() -> None:
    engine = ScriptedEngine("A.", "B.")
    check(engine, ">>> x\nA.\n>>> /edit\n! editing 'x'\n! unchanged\n>>> y\nB.")
    assert contents(engine.asked[1]) == ["x", "A.", "y"]


def test_clear_forgets_the_turns_and_keeps_the_system_message() -> None:
    engine = ScriptedEngine("A.", "B.")
    check(
        engine,
        """
        >>> /system Be brief.
        ! system message set
        >>> one
        A.
        >>> /clear
        ! forgotten
        >>> two
        B.
        >>> /system
        ! no system message
        """,
    )
    assert contents(engine.asked[1]) == ["Be brief.", "two"]


def test_settings_reach_the_engine() -> None:
    engine = ScriptedEngine("A.")
    check(
        engine,
        """
        >>> /set temperature 0
        ! temperature 0.0
        >>> /set top-k 5
        ! top-k 5
        >>> /set gamma 2
        ! gamma 2
        >>> /set max-tokens 9
        ! max-tokens 9
        >>> /set repeat-penalty
        ! repeat-penalty 1.0
        >>> /set
        ! temperature 0.0
        ! top-k 5
        ! top-p 0.95
        ! min-p 0.05
        ! typical-p 1.0
        ! top-n-sigma 0.0
        ! repeat-penalty 1.0
        ! frequency-penalty 0.0
        ! presence-penalty 0.0
        ! penalty-last-n 64
        ! gamma 2
        ! max-tokens 9
        ! seed none
        >>> x
        A.
        """,
    )
    options = engine.options[0]
    assert (options["sampling"].temperature, options["sampling"].top_k) == (0, 5)
    assert (options["gamma"], options["max_tokens"]) == (2, 9)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/retyr", "there is no command /retyr / Did you mean /retry?"),
        ("/xyz", "there is no command /xyz / /help lists the commands."),
        ("/retry", "there is no message yet"),
        ("/edit", "there is no message yet"),
        ("/stats", "there is no answer yet"),
        ("/set colour red", "there is no setting 'colour' / /set lists them."),
        ("/set colour", "there is no setting 'colour' / /set lists them."),
        ("/set temprature 1", "there is no setting 'temprature' / Did you mean temperature?"),
        ("/set max-token 1", "there is no setting 'max-token' / Did you mean max-tokens?"),
        ("/set temperature hot", "temperature: 'hot' is not a number"),
        ("/set temperature -1", "temperature must be 0 or more, not -1.0"),
        ("/set gamma 99", "gamma must be 'auto' or between 0 and 16, not 99"),
        ("/save", "a file name is missing / /save FILE, /load FILE"),
        ("/save /", "a file name is missing / /save FILE, /load FILE"),
        ("/save a\0b", "a file name is missing / /save FILE, /load FILE"),
        ("/set max-tokens 0", "max-tokens must be a number of 1 or more, not 0 / none: no limit."),
        (
            "/set seed -5",
            "seed must be a number of 0 or more, not -5 / none: another one each time.",
        ),
        (f"/set gamma {'9' * 20}", f"gamma must be 'auto' or between 0 and 16, not {'9' * 20!r}"),
        ("/set gamma many", "gamma must be 'auto' or between 0 and 16, not 'many'"),
        ("/load /no/such/file", "cannot read /no/such/file: No such file or directory"),
        ("/save /no/such/file", "cannot write /no/such/file: No such file or directory"),
    ],
)
def test_wrong_command_is_an_error_and_never_sent_to_the_model(line: str, message: str) -> None:
    engine = ScriptedEngine()
    check(engine, f">>> {line}\n? {message}")
    assert not engine.asked


def test_double_slash_sends_a_slash_and_an_empty_line_nothing() -> None:
    engine = ScriptedEngine("A.")
    session = check(engine, ">>> //etc is a folder\nA.")
    assert session.handle("   ") is True
    assert contents(engine.asked[0]) == ["/etc is a folder"]


def test_error_of_the_engine_keeps_the_session_and_its_history() -> None:
    engine = ScriptedEngine("A.", ContextOverflowError("too long"), "B.")
    check(engine, ">>> one\nA.\n>>> two\n? too long\n>>> three\nB.")
    assert contents(engine.asked[2]) == ["one", "A.", "three"]


def test_stats_and_drafts() -> None:
    engine = ScriptedEngine("Abc.", "D.")
    session = check(engine, ">>> x\nAbc.\n>>> /drafts\n! drafted tokens are green\n>>> y\nD.")
    screen = session._screen
    assert isinstance(screen, Paper)
    assert screen.colours == [False, True]
    session.handle("/stats")
    assert "! block_efficiency 2.000" in screen.lines
    assert "! acceptance_rate -" in screen.lines
    assert "! plain_rounds -" in screen.lines
    assert "! exact no" in screen.lines
    session.handle("/clear")
    session.handle("/stats")
    assert screen.lines[-1] == "? there is no answer yet"


def test_saved_conversation_can_be_loaded_and_continued(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    engine = ScriptedEngine("A.", "B.")
    check(
        engine,
        f">>> /system S\n! system message set\n>>> one\nA.\n>>> /save {file}\n! saved 2 messages",
    )
    check(engine, f">>> /load {file}\n! loaded 2 messages\n>>> two\nB.")
    assert contents(engine.asked[1]) == ["S", "one", "A.", "two"]
    assert [p.name for p in tmp_path.iterdir()] == ["talk.json"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"messages": [{"role": "user"}]}', "\ufffd"),
        '{"messages": [{"role": null, "content": null}]}',
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
)
def test_file_that_is_no_conversation_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(text)
    check(ScriptedEngine(), f">>> /load {file}\n? {file} is not a saved conversation")


def test_help_names_every_command() -> None:
    session = check(ScriptedEngine(), ">>> /drafts\n! drafted tokens are green")
    session.handle("/help")
    screen = session._screen
    assert isinstance(screen, Paper)
    for name in dir(Session):
        if name.startswith("_do_"):
            assert any(f"! /{name.removeprefix('_do_')}" in line for line in screen.lines)


def test_saved_file_is_plain_json(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    check(ScriptedEngine("Ä."), f">>> ü\nÄ.\n>>> /save {file}\n! saved 2 messages")
    assert json.loads(file.read_text(encoding="utf-8"))["messages"][1]["content"] == "Ä."


def test_save_replaces_a_conversation_and_nothing_else(tmp_path: Path) -> None:
    saved, program = tmp_path / "chat.json", tmp_path / "app.py"
    program.write_text("print()\n", encoding="utf-8")
    check(
        ScriptedEngine("A.", "B."),
        f">>> one\nA.\n>>> /save {saved}\n! saved 2 messages\n"
        f">>> two\nB.\n>>> /save {saved}\n! saved 4 messages over those that were there\n"
        f">>> /save {program}\n? {program} is not a saved conversation",
    )
    assert program.read_text(encoding="utf-8") == "print()\n"
    assert len(json.loads(saved.read_text(encoding="utf-8"))["messages"]) == 4


def test_save_into_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    check(ScriptedEngine(), f">>> /save {folder}\n? {folder} is not a saved conversation")
    assert list(tmp_path.iterdir()) == [folder]


def test_retry_after_loading_a_question_without_answer(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    engine = ScriptedEngine("A.")
    check(engine, f">>> /load {file}\n! loaded 1 messages\n>>> /retry\nA.")


def test_saving_takes_no_other_file(tmp_path: Path) -> None:
    other, talk, link = (tmp_path / name for name in ("talk.json.new", "talk.json", "link.json"))
    other.write_text("precious")
    talk.write_text('{"messages": []}')
    talk.chmod(0o600)
    link.symlink_to(talk)
    engine = ScriptedEngine("A.")
    over = "! saved 2 messages over those that were there"
    check(engine, f">>> x\nA.\n>>> /save {link}\n{over}")
    assert other.read_text() == "precious"
    assert link.is_symlink()
    assert json.loads(talk.read_text())["messages"][0] == {"role": "user", "content": "x"}
    assert talk.stat().st_mode & 0o777 == 0o600


def test_pipe_is_no_conversation_to_save_or_load(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for command in ("save", "load"):
        check(ScriptedEngine(), f">>> /{command} {pipe}\n? {pipe} is not a saved conversation")
    assert pipe.is_fifo()


def test_name_that_no_file_can_have_keeps_the_session() -> None:
    name = "a" * 300
    for command, verb in (("save", "write"), ("load", "read")):
        check(
            ScriptedEngine(), f">>> /{command} {name}\n? cannot {verb} {name}: File name too long"
        )


def test_deeply_nested_file_is_no_conversation(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text("[" * 100_000)
    check(ScriptedEngine(), f">>> /load {file}\n? {file} is not a saved conversation")


def test_settings_can_be_taken_back() -> None:
    engine = ScriptedEngine("A.")
    check(engine, ">>> /set seed 5\n! seed 5\n>>> /set seed none\n! seed none\n>>> x\nA.")
    assert "seed" not in engine.options[0]


def test_same_question_again_interrupted_leaves_the_first_answer_alone() -> None:
    engine = ScriptedEngine("A.", "^C", "B.")
    check(engine, ">>> x\nA.\n>>> x\n\n>>> /retry\nB.")
    assert contents(engine.asked[2]) == ["x", "A.", "x"]


# Questions and answers of ten tokens each, in a window of 60 that keeps 15 for an answer.
ANSWERS = "answer: 1.", "answer: 2.", "answer: 3.", "answer: 4."
TOO_LONG = (
    "? the message alone makes a prompt of 70 tokens, and the window has 60: no room for an answer"
)


def narrow(*answers: str | LspecError) -> ScriptedEngine:
    engine = ScriptedEngine(*answers)
    engine.n_ctx = 60
    return engine


def test_full_window_drops_the_oldest_turns_and_says_so() -> None:
    engine = narrow(*ANSWERS)
    check(
        engine,
        """
        >>> question 1
        answer: 1.
        >>> question 2
        answer: 2.
        >>> question 3
        ! the window is full: the model forgets the oldest turn
        answer: 3.
        >>> question 4
        ! the window is full: the model forgets the oldest turn
        answer: 4.
        """,
    )
    assert contents(engine.asked[2]) == ["question 2", "answer: 2.", "question 3"]
    assert contents(engine.asked[3]) == ["question 3", "answer: 3.", "question 4"]


def test_system_message_outlasts_the_turns() -> None:
    engine = narrow(*ANSWERS)
    check(
        engine,
        """
        >>> /system Be brief.!
        ! system message set
        >>> question 1
        answer: 1.
        >>> question 2
        answer: 2.
        >>> question 3
        ! the window is full: the model forgets the 2 oldest turns
        answer: 3.
        """,
    )
    assert contents(engine.asked[2]) == ["Be brief.!", "question 3"]


def test_full_window_stops_the_conversation_if_told_so_and_keeps_it() -> None:
    engine = narrow("answer: 1.", "answer: 2.", "answer: 3.")
    session = check(
        engine,
        """
        >>> question 1
        answer: 1.
        >>> question 2
        answer: 2.
        >>> question 3
        ? the window of 60 tokens is full: less than 15 are left for an answer / /clear starts a \
new conversation, /save FILE keeps this one. --ctx N makes the window larger, --overflow drop goes \
on without the oldest turns.
        >>> /clear
        ! forgotten
        >>> question 3
        answer: 3.
        """,
        overflow="stop",
    )
    assert contents(engine.asked[2]) == ["question 3"]
    assert session.handle("/bye") is False


def test_message_that_is_too_long_alone_is_refused_and_nothing_is_lost() -> None:
    engine = narrow("answer: 1.", "answer: 2.")
    check(
        engine,
        f"""
        >>> question 1
        answer: 1.
        >>> {"x" * 70}
        {TOO_LONG}
        >>> question 2
        answer: 2.
        """,
    )
    assert contents(engine.asked[1]) == ["question 1", "answer: 1.", "question 2"]


def test_edit_to_a_message_that_is_too_long_changes_nothing() -> None:
    engine = narrow("answer: 1.", "answer: 2.")
    session = check(
        engine,
        f"""
        >>> question 1
        answer: 1.
        >>> /edit
        ! editing 'question 1'
        {TOO_LONG}
        >>> question 2
        answer: 2.
        """,
        edited="x" * 70,
    )
    assert contents(engine.asked[1]) == ["question 1", "answer: 1.", "question 2"]
    assert session.handle("/bye") is False


def test_retry_after_turns_were_dropped_asks_the_same_again() -> None:
    engine = narrow(*ANSWERS)
    session = check(engine, ">>> question 1\nanswer: 1.\n>>> question 2\nanswer: 2.")
    session.handle("question 3")
    session.handle("/retry")
    assert contents(engine.asked[3]) == contents(engine.asked[2])


def test_dropped_turns_are_saved_and_seen_again_only_after_loading(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    engine = narrow(*ANSWERS)
    session = check(engine, ">>> question 1\nanswer: 1.\n>>> question 2\nanswer: 2.")
    session.handle("question 3")
    session.handle(f"/save {file}")
    saved = json.loads(file.read_text(encoding="utf-8"))["messages"]
    assert contents(saved)[::2] == ["question 1", "question 2", "question 3"]
    wide = ScriptedEngine("Yes.")
    check(wide, f">>> /load {file}\n! loaded 6 messages\n>>> Still there?\nYes.")
    assert contents(wide.asked[0]) == [*contents(saved), "Still there?"]


def test_answer_that_runs_into_the_end_of_the_window_is_pointed_out() -> None:
    note = "! the answer ends where the window of 60 tokens does: --ctx N makes it larger"
    check(narrow("Ten words^L"), f">>> Talk\nTen words\n{note}")
    check(narrow("Ten words^L"), f">>> Talk\nTen words\n{note}", max_tokens=10)
    check(narrow("Ten words^L"), ">>> Talk\nTen words", max_tokens=9)


def test_what_was_thought_is_no_part_of_the_history() -> None:
    engine = ScriptedEngine("<think>A?</think>A.", "<think>B^C", "<think>C?</think>C.")
    transcript = """
        >>> one
        <think>A?</think>A.
        >>> two
        <think>B
        >>> three
        <think>C?</think>C.
        """
    check(engine, transcript)
    assert contents(engine.asked[1]) == ["one", "A.", "two"]
    assert contents(engine.asked[2]) == ["one", "A.", "three"]


def test_half_a_character_does_not_stop_a_conversation_from_being_saved(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    check(ScriptedEngine("A."), f">>> \ud83d\nA.\n>>> /save {file}\n! saved 2 messages")
    assert json.loads(file.read_text(encoding="utf-8"))["messages"][0]["content"] == "?"
