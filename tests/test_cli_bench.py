"""`lspec bench` from outside: what goes where, the formats, Ctrl-C, the plot."""

from __future__ import annotations

import csv
import io
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fabricated import COSTS, a_round, a_row, a_run
from test_cli import run

from lspec import bench as benchmark
from lspec.bench import Plan
from lspec.cli.bench import bench
from lspec.cli.bench_report import FORMATS, HEADERS, Report
from lspec.cli.plot import draw, require_matplotlib
from lspec.errors import LspecError
from lspec.params import SamplingParams
from lspec.prompts import Prompt

ROWS = (a_row("code|more", 1.5), a_row("all", 1.25, gamma="auto", temperature=1.0, alpha=None))


@pytest.fixture
def args(chat_model: Path, chat_draft: Path, tmp_path: Path) -> list[str]:
    """The options of a benchmark that takes no time."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": "a", "category": "code", "prompt": "Hi"}, {"id": "b", "prompt": "Yes?"}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    return [
        *("--target", str(chat_model), "--draft", str(chat_draft), "--ctx", "256"),
        *("--prompts", str(prompts), "--max-tokens", "12", "--calibration", "0"),
        *("--gamma", "0,2,4", "--temperature", "0,1", "--repeats", "2"),
    ]


def report(*, rows: tuple[Any, ...] = ROWS) -> Report:
    prompts = (Prompt("a", "code", ({"role": "user", "content": "Hi"},)),)
    plan = Plan(prompts, (4,), (0.0,), max_tokens=8, repeats=1, sampling=SamplingParams())
    return Report("a pair", plan, COSTS, 0.5, (), rows)


def test_table_and_verdict_are_on_stdout_and_nothing_else_anywhere(args: list[str]) -> None:
    done = run("bench", *args)
    assert done.returncode == 0
    assert done.stderr.startswith("the width of a pass moves this target's logits by up to ")
    header, *rows, verdict = done.stdout.splitlines()
    assert header.split() == " ".join(HEADERS).split()
    expected = [
        [t, gamma, category]
        for t in ("0", "1")
        for gamma in ("2", "4")
        for category in ("code", "other", "all")
    ]
    assert [row.split()[:3] for row in rows] == expected
    assert verdict.startswith("This pair ")


def test_json_has_the_documented_names_and_the_verdict_is_on_stderr_too(args: list[str]) -> None:
    done = run("bench", *args, "-o", "json", "--top-k", "0", "--top-p", "1", "--min-p", "0")
    result = json.loads(done.stdout)
    assert done.returncode == 0
    assert done.stderr == result["verdict"] + "\n"
    assert 0 < result["width_difference"] < 1
    assert result["interrupted"] is False
    assert result["sampling"].items() >= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}.items()
    assert (result["repeats"], result["max_tokens"], result["seed"]) == (2, 12, 0)
    assert len(result["costs"]["draft"]) == len(result["costs"]["target"]) == 17
    assert len(result["rows"]) == 12
    assert set(result["rows"][0]) >= {
        *("acceptance_rate", "block_efficiency", "cost_coefficient", "verify_cost"),
        *("improvement_factor", "speedup", "speedup_mean", "tokens_per_s", "outside_models"),
    }
    assert set(result["rows"][0]["speedup"]) == {"median", "low", "high"}
    assert len(result["runs"]) == 2 * 2 * 2 * 3
    for entry in result["runs"]:
        assert 0 < entry["tokens"] <= 12
        assert entry["tokens"] == entry["accepted"] + entry["rounds"] or entry["drafted"]
        assert entry["draft_s"] + entry["target_s"] <= entry["total_s"]


@pytest.mark.parametrize(
    ("seconds", "changed"),
    [((1.0, 1.02), False), ((1.0, 1.3), True), ((0.8, 0.8), True), ((), False)],
)
def test_machine_that_changes_its_speed_is_named(seconds: tuple[float, ...], changed: bool) -> None:
    rounds = [a_round(0, 0, target_s=s) for s in seconds]
    runs = tuple(a_run(f"code-{i}", 0, [r], total_s=1.0) for i, r in enumerate(rounds))
    fast = a_run("code-1", 4, [a_round(4, 4, target_s=9.0)], total_s=9.0)
    caveats = replace(report(), width_difference=0.0, runs=(*runs, fast)).caveats
    assert len(caveats) == changed
    assert all(caveat.startswith("this machine changed its speed: a plain") for caveat in caveats)


def test_table_has_room_for_the_first_positions_only() -> None:
    rows = [replace(a_row("all", 1.5), accepted_by_position=(0.9,) * n) for n in (5, 16)]
    _, five, sixteen = FORMATS["table"](report(rows=tuple(rows))).splitlines()
    assert five.endswith("0.90 0.90 0.90 0.90 0.90")
    assert sixteen.endswith("0.90 0.90 0.90 0.90 0.90 …")


def test_csv_has_one_line_a_row() -> None:
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](report()))))
    assert [row["category"] for row in rows] == ["code|more", "all"]
    assert [row["gamma"] for row in rows] == ["4", "auto"]
    assert float(rows[0]["speedup_low"]) < float(rows[0]["speedup"]) == 1.5
    assert rows[0]["accepted_by_position"].split(" ") == ["0.9", "0.8", "", "0.5"]
    assert rows[1]["acceptance_rate"] == ""


def test_csv_keeps_the_verdict_out_of_stdout(args: list[str]) -> None:
    done = run("bench", *args, "-o", "csv", "--category", "code")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["category"] for row in rows] == ["all"] * 4
    assert done.stderr.startswith("This pair ")


def test_markdown_is_a_table_of_equal_rows() -> None:
    header, rules, *rows = FORMATS["md"](report()).splitlines()
    assert header.strip("| ").split(" | ") == list(HEADERS)
    assert set(rules) == set("|:- ")
    assert [line.replace(r"\|", "").count("|") for line in rows] == [len(HEADERS) + 1] * 2


def test_table_is_aligned_and_shows_speedups_below_1_as_they_are() -> None:
    table = FORMATS["table"](report(rows=(a_row("all", 0.41), a_row("copy", 12.5))))
    header, *rows = table.splitlines()
    end = header.index("tok/s") + len("tok/s")
    assert [row[end - 4 : end] for row in rows] == ["10.0", "10.0"]
    assert "0.41 (0.40-0.42)" in rows[0]
    assert rows[0].endswith("0.90 0.80 - 0.50")


def test_formats_of_no_rows_are_no_errors() -> None:
    for write in FORMATS.values():
        write(report(rows=()))
    assert json.loads(FORMATS["json"](report(rows=())))["rows"] == []
    assert FORMATS["csv"](report(rows=())) == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gamma", "0"], "besides 0"),
        (["--gamma", ","], "nothing is listed"),
        (["--gamma", "2,many"], "'many'"),
        (["--gamma", "2,17"], "gamma"),
        (["--temperature", "0,hot"], "hot"),
        (["--temperature", "0,-1"], "temperature"),
        (["--top-p", "2"], "--top-p"),
        (["--repeats", "0"], "--repeats"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--limit", "0"], "--limit"),
        (["--category", "verse"], "There are: code, other."),
        (["--drafter", "none"], "nothing to compare"),
        (["--prompts", "/no/such"], "/no/such"),
        (["-o", "xml"], "xml"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(
    args: list[str], options: list[str], message: str
) -> None:
    done = run("bench", *args, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_line_of_the_users_prompts_is_named(args: list[str], tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "fine"}\n{"promt": "typo"}\n')
    done = run("bench", *args, "--prompts", str(own))
    assert done.returncode == 2
    assert f"{own}, line 2: needs 'prompt' or 'messages'" in done.stderr


def test_gammas_may_come_from_the_environment(args: list[str]) -> None:
    args = [*args[: args.index("--gamma")], "--repeats", "1", "-o", "json"]
    done = run("bench", *args, env={"LSPEC_GAMMA": "3", "LSPEC_TEMPERATURE": "0.5"})
    settings = {(row["gamma"], row["temperature"]) for row in json.loads(done.stdout)["rows"]}
    assert settings == {(3, 0.5)}


def interrupt_after(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C when `n` answers have been measured."""
    real = benchmark.run

    def pressing(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for i, result in enumerate(real(*args, **kwargs), start=1):
            yield result
            if i == n:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(benchmark, "run", pressing)


def test_ctrl_c_prints_what_was_measured_and_exits_with_130(
    args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_after(8, monkeypatch)
    code = bench.main([*args, "-o", "json"], standalone_mode=False)
    printed = json.loads(capsys.readouterr().out)
    assert code == 130
    assert printed["interrupted"] is True
    assert len(printed["runs"]) == 8
    assert {row["prompts"] for row in printed["rows"]} == {1}


def test_ctrl_c_before_anything_was_measured_says_so(
    args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_after(1, monkeypatch)
    assert bench.main(args, standalone_mode=False) == 130
    out = capsys.readouterr().out
    assert out == "Nothing was measured to the end, so there is no verdict.\n"


def test_narrow_terminal_gets_fewer_columns(
    args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    headers = {}
    for columns in (80, 100, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        bench.main(args, standalone_mode=False)
        table = capsys.readouterr().out.splitlines()[:-1]
        assert max(map(len, table)) <= columns
        headers[columns] = table[0].split("  ")
    assert headers[200][-1] == "accepted by position"
    assert {"T", "gamma", "category", "speedup"} <= {name.strip() for name in headers[80]}


def test_progress_is_shown_on_a_terminal_only(
    args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bench.main(args, standalone_mode=False)
    captured = capsys.readouterr()
    assert "/24 [" in captured.err
    assert "24/24" not in captured.out


def test_plot_is_an_image(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        a_row(category, speedup, gamma=gamma, temperature=temperature)
        for temperature in (0.0, 1.0)
        for gamma in (2, "auto")
        for category, speedup in (("code", 1.5), ("copy", 2.5), ("all", 1.4))
    ]
    draw(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_plot_copes_with_settings_that_drafted_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    idle = replace(a_row("all", 1.0, gamma="auto", alpha=None), accepted_by_position=())
    draw([idle], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()


def test_plot_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for path in (tmp_path / "missing" / "plot.png", tmp_path / "plot.xyz"):
        with pytest.raises(LspecError, match=str(path)):
            draw([a_row("all", 1.5)], path)


def test_missing_matplotlib_is_said_before_anything_is_measured(
    args: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lspec.cli.plot.find_spec", lambda name: None)
    with pytest.raises(LspecError, match="needs matplotlib") as caught:
        require_matplotlib()
    assert "lspec[plot]" in caught.value.hint
    monkeypatch.setattr(benchmark, "run", None)
    with pytest.raises(LspecError, match="needs matplotlib"):
        bench.main([*args, "--plot", str(tmp_path / "plot.png")], standalone_mode=False)
