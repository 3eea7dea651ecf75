from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tiny

import lspec
from lspec import integrity, probe
from lspec.errors import ModelLoadError
from lspec.gguf import read_header


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty memory of what passed, in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "_passed", set())
    return tmp_path / "cache"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return tiny.write_chat_model(tmp_path / "good.gguf")


def with_number(path: Path, key: str, value: int) -> Path:
    """Set a 32-bit number of the metadata in a file."""
    data = bytearray(path.read_bytes())
    at = data.index(key.encode()) + len(key) + 4
    data[at : at + 4] = value.to_bytes(4, "little")
    path.write_bytes(data)
    return path


def with_double_token(path: Path) -> Path:
    one = (1).to_bytes(8, "little")
    path.write_bytes(path.read_bytes().replace(one + b"b", one + b"a", 1))
    return path


memory_is_limited = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="the memory of a trial is not limited here"
)


def never(*args: object, **kwargs: object) -> None:
    raise AssertionError("a process was started")


def instead(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run `code` in place of the trial."""
    monkeypatch.setattr(probe, "_COMMAND", (sys.executable, "-c", code))


def test_sound_file_is_tried_once(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe.require_loadable([good], [])
    monkeypatch.setattr(subprocess, "Popen", never)
    probe.require_loadable([good], [good])
    monkeypatch.setattr(probe, "_passed", set())  # as another process would find it
    probe.require_loadable([good])


def test_file_that_has_changed_is_tried_again(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe.require_loadable([good])
    os.utime(good, (1, 1))
    monkeypatch.setattr(subprocess, "Popen", never)
    with pytest.raises(AssertionError):
        probe.require_loadable([good])


def test_another_llama_cpp_tries_the_file_again(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe.require_loadable([good])
    monkeypatch.setattr(subprocess, "Popen", never)
    monkeypatch.setattr(probe, "VERSION", "9.9.9")
    with pytest.raises(AssertionError):
        probe.require_loadable([good])


def test_file_whose_hash_a_pull_has_checked_is_not_tried(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", never)
    integrity.remember_good(good, "0" * 64)
    probe.require_loadable([good])
    os.utime(good, (1, 1))
    with pytest.raises(AssertionError):
        probe.require_loadable([good])


def test_both_models_are_tried_in_one_process(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    run = probe._run

    def noted(models: Sequence[probe.Model]) -> tuple[str, str]:
        runs.append(models)
        return run(models)

    monkeypatch.setattr(probe, "_run", noted)
    other = tiny.write_spm_model(tmp_path / "other.gguf")
    probe.require_loadable([good], [other])
    assert runs == [[[good], [other]]]


def test_parts_of_a_split_model_are_tried_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = tiny.write_split_chat_model(tmp_path)
    probe.require_loadable(parts[:1])  # llama.cpp finds the others
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", never)
        probe.require_loadable(parts)
    data = parts[1].read_bytes()
    parts[1].write_bytes(data[:-32])
    with pytest.raises(ModelLoadError, match=f"{parts[1].name} is damaged"):
        probe.require_loadable(parts[:1])


# What llama.cpp dies of, and a word of the reason that is given.
DEADLY: dict[str, tuple[Callable[[Path], Path], str]] = {
    "many blocks": (lambda path: with_number(path, "llama.block_count", 1000), "n_layer_all"),
    "negative epsilon": (lambda path: with_number(path, "rms_epsilon", 0xBF800000), "eps"),
    "one token twice": (with_double_token, "token_to_id"),
}


@pytest.mark.parametrize("kind", DEADLY)
def test_file_that_kills_llama_cpp_is_an_error_with_the_cause(
    kind: str, good: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage, word = DEADLY[kind]
    deadly = damage(tiny.write_chat_model(tmp_path / "deadly.gguf"))
    for models in ([[deadly]], [[good], [deadly]]):
        with pytest.raises(ModelLoadError, match=rf"deadly\.gguf ends in a crash: .*{word}") as e:
            probe.require_loadable(*models)
        assert "\n" not in str(e.value)
        assert "fetch it again" in e.value.hint
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.rglob("core*"))


@memory_is_limited
def test_monstrous_allocation_is_refused(tmp_path: Path) -> None:
    path = tiny.write_law_model(tmp_path / "law.gguf", seed=1)
    with pytest.raises(ModelLoadError, match=r"law\.gguf: .*bad_alloc"):
        probe.require_loadable([with_number(path, "llama.vocab_size", 0xFFFFFFFF)])


def test_model_whose_logits_are_not_numbers_is_refused(good: Path) -> None:
    data = bytearray(good.read_bytes())
    at = read_header(good).data_end - 4
    for tensor in read_header(good).tensors:
        if tensor.name == "output_norm.weight":
            at = read_header(good).data_start + tensor.offset
    data[at : at + 4] = b"\0\0\xc0\x7f"
    good.write_bytes(data)
    with pytest.raises(ModelLoadError, match="its logits are not numbers"):
        probe.require_loadable([good])


def test_llama_cpps_own_refusal_is_passed_on(tmp_path: Path) -> None:
    path = tiny.write_projector(tmp_path / "projector.gguf")
    with pytest.raises(ModelLoadError, match=r"projector\.gguf: .*CLIP"):
        probe.require_loadable([path])


def test_load_and_check_refuse_what_would_kill_them(good: Path) -> None:
    with_double_token(good)
    with pytest.raises(ModelLoadError, match="ends in a crash"):
        lspec.load(target=good, drafter="none")
    from lspec.check import check

    with pytest.raises(ModelLoadError, match="ends in a crash"):
        check([good], [])


def test_draft_that_is_not_used_is_not_tried(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe.require_loadable([good])
    monkeypatch.setattr(subprocess, "Popen", never)
    lspec.load(target=good, draft=tmp_path / "none.gguf", drafter="none").close()


def test_command_ends_with_a_sentence_a_hint_and_exit_code_1(good: Path) -> None:
    with_double_token(good)
    command = [sys.executable, "-m", "lspec", "generate", "-p", "x", "--drafter", "none"]
    done = subprocess.run([*command, "--target", good], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    complaint, hint = done.stderr.splitlines()
    assert complaint.startswith(f"error: loading {good} ends in a crash: GGML_ASSERT(")
    assert "fetch it again" in hint


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("", ""),  # as where Python is built into another program
        (None, "raise SystemExit('cannot import lspec')"),
        (None, "print('something else')"),
    ],
)
def test_file_is_loaded_where_it_cannot_be_tried(
    good: Path, monkeypatch: pytest.MonkeyPatch, command: str | None, code: str
) -> None:
    instead(monkeypatch, code)
    if command is not None:
        monkeypatch.setattr(probe, "_COMMAND", (command,))
    lspec.load(target=good, drafter="none").close()


def test_frozen_program_does_not_start_itself(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(subprocess, "Popen", never)
    probe.require_loadable([good])


def test_trial_that_does_not_end_is_ended(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_SECONDS", 1.0)
    instead(monkeypatch, "import signal; print('ready', flush=True); signal.pause()")
    monkeypatch.setattr(probe, "_BYTES_PER_S", float("inf"))
    with pytest.raises(ModelLoadError, match="ends in a crash: it takes more than 1 s"):
        probe.require_loadable([good])


def test_trial_that_is_killed_may_have_lacked_memory(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(monkeypatch, "import os; print('ready', flush=True); os.kill(os.getpid(), 9)")
    with pytest.raises(ModelLoadError, match=r"Killed \(out of memory\?\)"):
        probe.require_loadable([good])


def test_interrupt_ends_the_trial_and_goes_on_up(
    good: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = "import os, signal; open({!r}, 'w').write(str(os.getpid())); print('ready', flush=True)"
    code = code.format(str(tmp_path / "pid")) + "; os.kill(os.getppid(), 2); signal.pause()"
    instead(monkeypatch, code)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            probe.require_loadable([good])
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_interrupt_that_only_the_trial_has_heard_goes_on_up(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(monkeypatch, "import os; print('ready', flush=True); os.kill(os.getpid(), 2)")
    with pytest.raises(KeyboardInterrupt):
        probe.require_loadable([good])


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_trial_hears_an_interrupt_in_the_middle_of_its_work(tmp_path: Path) -> None:
    path = tiny.write_chat_model(tmp_path / "endless.gguf", template=ENDLESS)
    with subprocess.Popen(
        probe._COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f'[["{path}"]]'.encode())
        process.stdin.close()
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait() == -signal.SIGINT


LIMITS = """
import resource, sys
from lspec import trial
trial.limit([])
print(resource.getrlimit(resource.RLIMIT_CORE)[0], resource.getrlimit(resource.RLIMIT_CPU)[0])
try:
    bytearray(2 * trial._SPARE_BYTES)
except MemoryError:
    print("refused")
"""


@memory_is_limited
def test_memory_and_time_of_a_trial_are_limited() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITS], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "20", "refused"]


def test_cache_that_cannot_be_written_means_another_trial(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    probe.require_loadable([good])
    monkeypatch.setattr(subprocess, "Popen", never)
    probe.require_loadable([good])  # this process knows it all the same
