"""`lspec chat` in a real terminal: a pseudo-terminal that this file types into."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

from lspec.cli.answer import stop_on_interrupt
from lspec.cli.terminal import Terminal
from lspec.errors import RequestError

PASTE_ON, PASTE_OFF = "\x1b[200~", "\x1b[201~"
CTRL_C, CTRL_D = "\x03", "\x04"
LONG = 60_000  # tokens of an answer that nobody waits for


class Typist:
    """Types into a program and reads what it shows."""

    def __init__(self, args: list[str], config: Path, **variables: str) -> None:
        self._screen, terminal = pty.openpty()
        env = {k: v for k, v in os.environ.items() if not k.startswith("LSPEC_")}
        env |= {"XDG_CONFIG_HOME": str(config), "TERM": "xterm", "NO_COLOR": "1", **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lspec", *args],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=env,
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(terminal)
        self._unread = ""

    def type(self, text: str | bytes) -> None:
        os.write(self._screen, text.encode() if isinstance(text, str) else text)

    def press_until(self, key: str, pattern: str) -> None:
        """Press `key` until `pattern` appears.

        Python's readline loses a signal that comes in the microseconds before it waits for input.
        """
        for _ in range(10):
            self.type(key)
            while select.select([self._screen], [], [], 1)[0]:
                self._unread += os.read(self._screen, 65536).decode(errors="replace")
                if re.search(pattern, self._unread):
                    self.read_until(pattern)
                    return
        pytest.fail(f"{pattern!r} did not appear in {self._unread[-500:]!r}")

    def read_until(self, pattern: str) -> str:
        """Return what appears up to the end of `pattern`; fail if it does not come."""
        while not (found := re.search(pattern, self._unread)):
            ready, _, _ = select.select([self._screen], [], [], 30)
            assert ready, f"{pattern!r} did not appear in {self._unread[-500:]!r}"
            try:
                self._unread += os.read(self._screen, 65536).decode(errors="replace")
            except OSError:  # the program has closed the terminal
                pytest.fail(f"ended without {pattern!r}: {self._unread[-500:]!r}")
        shown, self._unread = self._unread[: found.end()], self._unread[found.end() :]
        return shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)


def _own_terminal() -> None:
    """Make stdin the controlling terminal, so that Ctrl-C is a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Hear Ctrl-C, also where the tests run in the background of a shell, which ignores it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Typist]:
    """A chat with a pair that talks until it is stopped."""
    files = [
        str(tiny.write_chat_model(tmp_path / name, seed=5, blur=blur, end_bias=-20, n_ctx=2 * LONG))
        for name, blur in (("target.gguf", 0.0), ("draft.gguf", 0.1))
    ]
    options = ["--target", files[0], "--draft", files[1], "--ctx", str(LONG), "--seed", "1"]
    typist = Typist(["chat", *options], tmp_path / "config")
    typist.read_until(">>> ")
    yield typist
    typist.close()


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(chat: Typist) -> None:
    chat.type("Tell me everything\r")
    chat.read_until(r"\n[^\n]{20}")
    chat.type(CTRL_C)
    chat.read_until(r"\(interrupted\)\r?\n\d+ tokens, .*\r?\n(.*)>>> ")
    chat.type("/set max-tokens 12\r")
    chat.read_until(">>> ")
    chat.type("And then?\r")
    chat.read_until(r"\r\n\(cut at 12 tokens\)\r\n12 tokens, .*\r\n(.*)>>> ")
    chat.type("/retry\r")
    chat.read_until(r"12 tokens, .*\r\n(.*)>>> ")
    chat.type("/bye\r")
    assert chat.process.wait(30) == 0


def test_ctrl_c_twice_within_a_pass_raises() -> None:
    with stop_on_interrupt() as should_stop:
        assert not should_stop()
        signal.raise_signal(signal.SIGINT)
        assert should_stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("editor", ['vi "', "rm -f"])
def test_editor_that_fails_keeps_the_conversation(
    monkeypatch: pytest.MonkeyPatch, editor: str
) -> None:
    monkeypatch.setenv("EDITOR", editor)
    monkeypatch.delenv("VISUAL", raising=False)
    with pytest.raises(RequestError, match="the editor failed"):
        Terminal(stats=False).edit("x")


def test_interrupted_command_prints_what_is_there_and_ends_with_130(tmp_path: Path) -> None:
    path = tiny.write_chat_model(tmp_path / "target.gguf", end_bias=-20, n_ctx=2 * LONG)
    command = ["generate", "--target", str(path), "--drafter", "none", "--ctx", str(LONG)]
    with subprocess.Popen(
        [sys.executable, "-m", "lspec", *command, "-p", "x"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert len(first + process.stdout.read()) > 1
    assert process.returncode == 130


def test_pasted_lines_are_one_message(chat: Typist, tmp_path: Path) -> None:
    chat.type("/set max-tokens 3\r")
    chat.read_until(">>> ")
    chat.type(f"{PASTE_ON}first line\nsecond line\nthird{PASTE_OFF}\r")
    chat.read_until(r"3 tokens, .*\r\n(.*)>>> ")
    chat.type(f"/save {tmp_path}/talk.json\r")
    chat.read_until("saved 2 messages")
    assert "first line\\nsecond line\\nthird" in (tmp_path / "talk.json").read_text()


def test_fences_enclose_a_message_of_several_lines(chat: Typist, tmp_path: Path) -> None:
    chat.type("/set max-tokens 3\r")
    chat.read_until(">>> ")
    chat.type('"""one\r')
    chat.read_until(r"\.\.\. ")
    chat.type('two"""\r')
    chat.read_until(r"3 tokens, .*\r\n(.*)>>> ")
    chat.type(f"/save {tmp_path}/talk.json\r")
    chat.read_until("saved 2 messages")
    assert '"one\\ntwo"' in (tmp_path / "talk.json").read_text()


def test_ctrl_c_at_the_prompt_gives_a_hint_and_ctrl_d_leaves(chat: Typist) -> None:
    chat.type("half a line")
    chat.read_until("half a line")
    chat.press_until(CTRL_C, "Ctrl-D or /bye leaves")
    chat.read_until(">>> ")
    chat.type(CTRL_D)
    assert chat.process.wait(30) == 0


def test_history_is_kept_in_a_private_file(chat: Typist, tmp_path: Path) -> None:
    chat.type("/stats\r")
    chat.read_until("no answer yet")
    chat.type("/bye\r")
    assert chat.process.wait(30) == 0
    history = tmp_path / "config" / "lspec" / "history"
    assert "/stats" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600
