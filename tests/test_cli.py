"""The command line from outside: what goes where, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from lspec.arguments import as_options
from lspec.cli.output import visible

ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("LSPEC_")}


def run(
    *args: str, text: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lspec", *args],
        input=text,
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, **(env or {})},
        timeout=60,
        check=False,
    )


@pytest.fixture
def pair(chat_model: Path, chat_draft: Path) -> list[str]:
    return ["--target", str(chat_model), "--draft", str(chat_draft)]


KEYS = [
    "prompt_tokens",
    "reused_tokens",
    "generated_tokens",
    "rounds",
    "drafted",
    "accepted",
    "acceptance_rate",
    "accepted_fraction",
    "block_efficiency",
    "prompt_s",
    "draft_s",
    "target_s",
    "total_s",
    "tokens_per_s",
    "exact",
    "rule",
    "gamma",
    "plain_rounds",
    "forced",
]


def test_json_is_one_object_with_the_documented_keys(pair: list[str]) -> None:
    options = ["--json", "-p", "Hello", "--temperature", "0", "--max-tokens=20", "--gamma=4"]
    done = run("generate", *pair, *options)
    result = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(result) == ["text", "tokens", "finish_reason", "seed", "stats"]
    assert list(result["stats"]) == KEYS
    assert result["stats"]["rounds"] < result["stats"]["generated_tokens"]


def test_ratios_without_a_denominator_are_null(pair: list[str]) -> None:
    done = run("generate", *pair, "--json", "-p", "Hello", "--max-tokens", "0")
    stats = json.loads(done.stdout)["stats"]
    assert stats["acceptance_rate"] is stats["block_efficiency"] is None


def test_text_goes_to_stdout_and_nothing_else_anywhere_when_piped(pair: list[str]) -> None:
    options = ["--temperature", "0", "--max-tokens", "20"]
    plain = run("generate", *pair, *options, "--drafter", "none", text="Hello")
    done = run("generate", *pair, *options, text="Hello")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == plain.stdout
    assert done.stdout.strip()


def test_statistics_line_is_on_stderr_when_asked_for(pair: list[str]) -> None:
    done = run("chat", *pair, "--stats", "-p", "Hello", "--max-tokens", "20", "--seed", "1")
    assert done.returncode == 0
    assert " tokens, " in done.stderr
    assert "per round" in done.stderr


def test_piped_input_comes_before_the_prompt(pair: list[str]) -> None:
    greedy = ["--temperature", "0", "--max-tokens", "10", "--json"]
    joined = run("generate", *pair, *greedy, "-p", "one\ntwo")
    piped = run("generate", *pair, *greedy, "-p", "two", text="one\n")
    assert json.loads(piped.stdout)["tokens"] == json.loads(joined.stdout)["tokens"]


def test_settings_come_from_the_environment_and_options_outrank_them(pair: list[str]) -> None:
    args = ["generate", *pair, "--json", "-p", "Hello", "--max-tokens", "20", "--seed", "1"]
    off = run(*args, env={"LSPEC_GAMMA": "0"})
    on = run(*args, "--gamma", "2", env={"LSPEC_GAMMA": "0"})
    assert json.loads(off.stdout)["stats"]["drafted"] == 0
    assert json.loads(on.stdout)["stats"]["drafted"] > 0


def test_typed_target_outranks_a_pair_in_the_environment(pair: list[str]) -> None:
    done = run("generate", *pair, "-p", "x", "--max-tokens", "1", env={"LSPEC_PAIR": "other"})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gamma", "many"], "neither a number"),
        (["--gamma", "17"], "gamma"),
        (["--gamma", "-1"], "gamma"),
        (["--drafter", "oracle"], "oracle"),
        (["--exact", "--rule", "rejection"], "rule of its own"),
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "2"], "--top-p"),
        (["--max-tokens", "-5"], "--max-tokens"),
        (["--ctx", "0"], "--ctx"),
        (["--threads", "-2"], "--threads"),
        (["--stop", ""], "stop"),
        (["a-pair"], "not both"),
        (["--logprobs", "2"], "--json"),
        (["--chat-template", "/no/such"], "/no/such"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(
    pair: list[str], args: list[str], message: str
) -> None:
    done = run("chat", *pair, "-p", "Hello", *args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_value_of_the_environment_names_its_variable(pair: list[str]) -> None:
    done = run("generate", *pair, "-p", "x", env={"LSPEC_GAMMA": "many"})
    assert done.returncode == 2
    assert "environment variable LSPEC_GAMMA" in done.stderr
    typed = run("generate", *pair, "-p", "x", "--gamma", "few", env={"LSPEC_GAMMA": "1"})
    assert "LSPEC_GAMMA" not in typed.stderr


def test_file_in_place_of_a_pair_is_told_the_option_for_it(chat_model: Path) -> None:
    done = run("chat", str(chat_model), "-p", "x")
    assert done.returncode == 1
    assert f"--target {chat_model}" in done.stderr


@pytest.mark.parametrize(
    ("said", "typed"),
    [
        ("n_ctx=1024, or draft_n_ctx=512.", "--ctx 1024, or --draft-ctx 512."),
        ('kv_type="q8_0" or force=True loads it', "--kv-type q8_0 or --force loads it"),
        ('target="my big.gguf", and draft=FILE', "--target 'my big.gguf', and --draft FILE"),
        ("top_p and repeat_penalty, not max_top_p", "--top-p and --repeat-penalty, not max_top_p"),
        ("gamma must be 'auto'; this_one is none", "gamma must be 'auto'; this_one is none"),
    ],
)
def test_what_the_library_says_of_arguments_is_said_of_options(said: str, typed: str) -> None:
    assert as_options(said) == typed


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--json-schema", '{"type": "text"}', "this json_schema cannot be followed: Invalid type"),
        ("--grammar", "root ::= a", "'a' not found"),
    ],
)
def test_broken_schema_or_grammar_is_told_before_models_are_loaded(
    tmp_path: Path, option: str, text: str, message: str
) -> None:
    file = tmp_path / "format"
    file.write_text(text)
    done = run("chat", "--target", str(tmp_path / "missing.gguf"), "-p", "x", option, str(file))
    assert done.returncode == 2
    assert message in done.stderr


def test_deeply_nested_json_is_wrong_usage(pair: list[str], tmp_path: Path) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    for command in (
        ["chat", *pair, "-p", "x", "--json-schema", str(deep)],
        ["bench", *pair, "--prompts", str(deep)],
    ):
        done = run(*command)
        assert done.returncode == 2
        assert "not JSON" in done.stderr


def test_caches_with_anything_in_them_are_made_anew(pair: list[str], tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    command = ["generate", *pair, "-p", "x", "--exact", "--max-tokens", "5", "--seed", "1"]
    first = run(*command, env=env)
    kept = [path for path in (tmp_path / "lspec").rglob("*") if path.is_file()]
    assert kept
    for path in kept:
        path.write_text("[" * 100_000)
    again = run(*command, env=env)
    assert (again.returncode, again.stdout) == (0, first.stdout)


def test_what_a_terminal_would_obey_is_written_out() -> None:
    assert visible("a\x1b[31m\tb\r\n\x9bc\x7f") == "a\\x1b[31m\tb\n\\x9bc\\x7f"
    done = run("chat", "--target", "/no/\x1b]0;title\x07.gguf", "-p", "x")
    assert "/no/\\x1b]0;title\\x07.gguf" in done.stderr


@pytest.mark.parametrize(
    ("pair", "hint"),
    [
        ("What is 2+2?", "given with -p TEXT"),
        ("./README.md", "--target ./README.md"),
        ("nope", "--name NAME` adds one"),
    ],
)
def test_what_is_no_pair_is_told_where_it_belongs(pair: str, hint: str) -> None:
    done = run("chat", pair, "-p", "x")
    assert done.returncode == 1
    assert hint in done.stderr
    assert "LSPEC_PAIR" not in done.stderr
    assert "variable LSPEC_PAIR" in run("chat", "-p", "x", env={"LSPEC_PAIR": "nope"}).stderr


def test_a_text_without_template_has_no_options_for_one() -> None:
    assert "--chat-template" not in run("generate", "--help").stdout
    assert "--chat-template" in run("chat", "--help").stdout


def test_answer_that_ends_for_another_reason_than_the_model_says_so(pair: list[str]) -> None:
    full = run("chat", *pair, "-p", "x", "--ctx", "40", "--temperature", "2", "--seed", "1")
    assert "window of 40 tokens" in full.stderr
    none = run("chat", *pair, "-p", "x", "--max-tokens", "0")
    assert "max-tokens is 0" in none.stderr
    assert run("chat", *pair, "-p", "x", "--max-tokens", "2").stderr == ""


def test_no_prompt_at_all_is_wrong_usage(pair: list[str]) -> None:
    assert run("generate", *pair).returncode == 2
    assert run("chat", *pair).returncode == 2


def test_broken_files_end_with_a_sentence_and_exit_code_1(tmp_path: Path) -> None:
    files = {
        "truncated": tiny.write_truncated(tmp_path / "truncated.gguf"),
        "empty": tiny.write_empty(tmp_path / "empty.gguf"),
        "text": tiny.write_web_page(tmp_path / "text.gguf"),
        "projector": tiny.write_projector(tmp_path / "projector.gguf"),
        "folder": tmp_path,
        "missing": tmp_path / "missing.gguf",
    }
    for kind, path in files.items():
        done = run("generate", "--target", str(path), "--drafter", "none", "-p", "Hello")
        assert done.returncode in (1, 2), (kind, done)
        assert str(path) in done.stderr, kind
        assert "Traceback" not in done.stderr, kind
        assert len(done.stderr.splitlines()) <= 4, done.stderr


def test_long_prompt_names_both_numbers(pair: list[str]) -> None:
    done = run("generate", *pair, "--ctx", "64", text="x" * 100)
    assert done.returncode == 1
    assert "100 tokens" in done.stderr
    assert "64" in done.stderr


def test_mismatched_pair_is_refused_before_any_text(tmp_path: Path, chat_model: Path) -> None:
    draft = tiny.write_chat_model(tmp_path / "other.gguf", merged="th")
    done = run("chat", "--target", str(chat_model), "--draft", str(draft), "-p", "Hello")
    assert (done.returncode, done.stdout) == (1, "")
    assert "token 256 is 'he' in the target and 'th' in the draft" in done.stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.gguf")
    done = run("generate", "--target", missing, "-p", "x", env={"LSPEC_DEBUG": "1"})
    assert "Traceback" in done.stderr


def test_reader_that_goes_away_ends_it_quietly(pair: list[str]) -> None:
    command = [sys.executable, "-m", "lspec", "generate", *pair, "-p", "x", "--seed", "1"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--system", "a\udcff"], "--system is not Unicode"),
        (["--chat-template", os.devnull], f"{os.devnull} is empty"),
        (["--grammar", "/dev/zero"], "/dev/zero is too long"),
        (["--json-schema", "true.json"], "true.json is no JSON schema"),
        (["--grammar", "bytes"], "it is no text in UTF-8"),
    ],
)
def test_what_cannot_be_used_is_told_before_models_are_loaded(
    tmp_path: Path, options: list[str], message: str
) -> None:
    (tmp_path / "true.json").write_text("true")
    (tmp_path / "bytes").write_bytes(b"\xac")
    option, value = options
    value = str(tmp_path / value) if (tmp_path / value).is_file() else value
    done = run("chat", "--target", str(tmp_path / "missing.gguf"), "-p", "x", option, value)
    assert done.returncode == 2
    assert message in done.stderr


def test_hint_is_in_the_traceback() -> None:
    code = "import lspec; lspec.load('nobody')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("`lspec ls` lists all pairs;")


@pytest.mark.parametrize(
    ("word", "hint"), [("chatt", " Did you mean 'chat'?"), ("help", "\n`lspec --help` lists")]
)
def test_unknown_command_is_met_with_a_hint(word: str, hint: str) -> None:
    done = run(word)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"No such command {word!r}.{hint}" in done.stderr.replace("python -m lspec", "lspec")


def test_conversation_needs_a_terminal() -> None:
    done = run("chat", "--interactive", "-p", "Hi")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--interactive is for a terminal" in done.stderr


def test_every_command_is_in_the_help_and_has_its_own() -> None:
    from lspec.cli import COMMANDS

    listed = run("--help").stdout
    for name in COMMANDS:
        assert f"  {name} " in listed
        assert run(name, "--help").returncode == 0


def test_version() -> None:
    import lspec

    assert lspec.__version__ in run("--version").stdout


def shell(command: str, pair: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    """Run `lspec` through a shell, for its redirections; $PAIR holds the model options."""
    return subprocess.run(
        ["bash", "-c", command.replace("lspec", f"{sys.executable} -m lspec")],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "PAIR": " ".join(pair), **env},
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("command", ["generate $PAIR -p x --max-tokens 2", "ls"])
def test_closed_and_full_streams_do_not_upset_it(pair: list[str], command: str) -> None:
    assert shell(f"lspec {command} <&-", pair).returncode == 0
    assert shell(f"lspec {command} >&-", pair).returncode == 0
    full = shell(f"lspec {command} >/dev/full", pair)
    assert full.returncode in (0, 1)
    assert "Traceback" not in full.stderr


def test_characters_that_the_terminal_lacks_are_replaced(tmp_path: Path, pair: list[str]) -> None:
    template = tmp_path / "t"
    template.write_text("é漢")
    done = shell(
        f"lspec chat $PAIR -p x --seed 1 --temperature 2 --max-tokens 9 --chat-template {template}",
        pair,
        PYTHONIOENCODING="ascii",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_typed_pair_outranks_files_in_the_environment() -> None:
    done = run("show", "no-such-pair", env={"LSPEC_TARGET": "/no/such"})
    assert "no-such-pair" in done.stderr
    done = run("generate", "no-such-pair", "-p", "x", env={"LSPEC_TARGET": "/no/such"})
    assert "no-such-pair" in done.stderr


def test_config_folder_that_cannot_be_made_is_no_catalogue() -> None:
    assert run("ls", env={"XDG_CONFIG_HOME": "/dev/null"}).returncode == 0


def test_cache_that_cannot_be_written_only_forgets(pair: list[str]) -> None:
    env = {"XDG_CACHE_HOME": "/dev/null"}
    done = run("generate", *pair, "-p", "x", "--gamma", "auto", "--max-tokens", "2", env=env)
    assert (done.returncode, done.stderr) == (0, "")


def test_windows_can_be_chosen_for_both_models(pair: list[str]) -> None:
    rest = ["-p", "x", "--max-tokens", "2", "--gamma", "2"]
    done = run("generate", *pair, *rest, "--ctx", "auto", "--draft-ctx", "256", "--force")
    assert (done.returncode, done.stderr) == (0, "")
    done = run("generate", *pair, *rest, "--ctx", "many")
    assert done.returncode == 2
    assert "'many' is neither a number nor 'auto'" in done.stderr
