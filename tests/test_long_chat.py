"""One conversation of 500 turns, much longer than its window."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny

import lspec
from lspec.cli.session import Session
from lspec.errors import LspecError
from lspec.request import Chunk, Completion

STATM = Path("/proc/self/statm")
N_CTX, ANSWER = 512, 8
WARM = 100  # turns, before memory is looked at first
MOST_GROWTH = 2**21  # bytes, in the other turns

pytestmark = pytest.mark.skipif(not STATM.exists(), reason="needs /proc")


class Ledger:
    """A screen that keeps what answers cost; `leak` bytes are lost with each."""

    def __init__(self, leak: int = 0) -> None:
        self.answers: list[tuple[int, int, int]] = []  # prompt, reused, generated tokens
        self.dropped: dict[int, str] = {}  # by the turn before which it was said
        self._leak, self._lost = leak, list[bytes]()

    def play(self, start: Callable[..., Iterator[Chunk]], *, colour: bool) -> Completion:
        *_, last = start(should_stop=lambda: False)
        assert last.completion is not None
        stats = last.completion.stats
        self.answers.append((stats.prompt_tokens, stats.reused_tokens, stats.generated_tokens))
        self._lost.append(b"x" * self._leak)
        return last.completion

    def note(self, text: str) -> None:
        self.dropped[len(self.answers)] = text

    def error(self, error: LspecError) -> None:
        raise error

    def edit(self, text: str) -> str | None:
        raise NotImplementedError


@pytest.fixture(scope="module")
def files(models: Path) -> tuple[Path, Path]:
    """A pair that never ends an answer by itself."""
    target = tiny.write_chat_model(models / "talks.gguf", seed=3, end_bias=-20)
    draft = tiny.write_chat_model(models / "talks-draft.gguf", seed=3, blur=0.1, end_bias=-20)
    return target, draft


def resident() -> int:
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def talk(
    files: tuple[Path, Path], drafter: str, screen: Ledger, *, turns: int, then: str = ""
) -> int:
    """Play all turns, say `then`, and return by how many bytes memory grew after the first ones."""
    early = 0
    with lspec.load(
        target=files[0], draft=files[1], drafter=drafter, gamma=3, n_ctx=N_CTX, n_threads=1
    ) as engine:
        session = Session(
            engine,
            screen,
            options={"max_tokens": ANSWER, "seed": 1},
            system="Be brief.",
            overflow="drop",
        )
        for i in range(turns):
            assert session.handle(f"Question {i}")
            if i == WARM:
                early = resident()
        late = resident()
        session.handle(then)
    return late - early


@pytest.mark.parametrize(("drafter", "turns"), [("model", 500), ("ngram", 250)])
def test_all_turns_fit_and_memory_is_flat(
    files: tuple[Path, Path], drafter: str, turns: int, tmp_path: Path
) -> None:
    screen = Ledger()
    saving = f"/save {tmp_path / 'talk.json'}"
    growth = talk(files, drafter, screen, turns=turns, then=saving)
    assert screen.dropped.pop(turns) == f"saved {2 * turns} messages"
    assert [generated for _, _, generated in screen.answers] == [ANSWER] * turns
    assert max(prompt for prompt, _, _ in screen.answers) <= N_CTX - ANSWER
    assert growth < MOST_GROWTH

    assert all("the model forgets the" in note for note in screen.dropped.values())
    assert turns / 10 < len(screen.dropped) < turns / 2
    for i in range(1, turns):
        before, (prompt, reused, _) = screen.answers[i - 1][0], screen.answers[i]
        if i in screen.dropped:  # as much as the system message, then it begins otherwise
            assert len("Be brief.") < reused < 60
            assert prompt <= N_CTX * 3 // 4 - ANSWER
        else:
            assert reused >= before


def test_a_leak_would_be_seen(files: tuple[Path, Path]) -> None:
    screen = Ledger(leak=2**20)  # more than a heap that others have used could hide
    assert talk(files, "none", screen, turns=2 * WARM) > MOST_GROWTH
