"""`lspec check`: what it finds out about a pair, and how it says so."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from steering import BETWEEN, COMPUTE_BOUND, MEMORY_BOUND
from test_cli import run
from test_cli_memory import ON_CPU
from test_cli_memory import SAID as MEMORY_SAID

from lspec import theory
from lspec.check import ALPHAS, Facts, Measured, Prediction, Report, predict
from lspec.check import check as examine
from lspec.cli import check as command
from lspec.cli.check import ranges
from lspec.cli.memory import memory_object
from lspec.errors import LspecError, RequestError
from lspec.fitting import Free
from lspec.llama import LoadOptions
from lspec.offload import Offload
from lspec.planning import Planner
from lspec.selfcheck import Choice, Findings, best
from lspec.widths import CONTEXTS, WIDTHS, Widths


@pytest.fixture(autouse=True)
def small_machine(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread, which other processes disturb less, and a cache of these tests' own."""
    for module in ("lspec.llama.native", "lspec.selfcheck"):
        monkeypatch.setattr(f"{module}.usable_cores", lambda: 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "check-cache"))
    monkeypatch.delenv("LSPEC_PAIR", raising=False)


@pytest.fixture(scope="session")
def mismatched(models: Path) -> Path:
    return tiny.write_chat_model(models / "mismatched.gguf", seed=3, merged="hi")


def printed(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Run the command in this process; return its exit code, stdout and stderr."""
    code = command.check.main([*map(str, args)], standalone_mode=False)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# -- what is found out --


def test_report_of_a_pair(chat_model: Path, chat_draft: Path) -> None:
    said: list[str] = []
    report = examine([chat_model], [chat_draft], say=said.append)
    assert report is not None
    assert report.mismatch is None
    assert report.draft is not None
    for facts, path in ((report.target, chat_model), (report.draft, chat_draft)):
        assert facts.files == (str(path),)
        assert facts.size == path.stat().st_size
        assert facts.rolls_back is True
    for model in report.memory.plan.models:
        assert model.host.cache == 4096 * tiny.BLOCKS * 2 * tiny.WIDTH * 2
    assert said[0].startswith("exact mode: ")
    found = report.measured
    assert found is not None
    assert found.device == "on the CPU with 1 threads"
    assert found.costs.draft is not None
    assert found.predictions == tuple(predict(found.costs))
    assert found.exact[0].kv_type == "f16"
    assert found.exact[0].widths is not None
    assert found.exact[0].widths.contexts == CONTEXTS
    assert sorted(sum(found.exact[0].widths.classes, ())) == list(WIDTHS)
    assert found.choice == best(found.exact)
    assert found.peak_bytes is None or found.peak_bytes > 10**7


def test_target_alone_has_no_predictions(chat_model: Path) -> None:
    report = examine([chat_model], [])
    assert report is not None
    assert report.draft is None
    assert report.measured is not None
    assert report.measured.predictions == ()
    assert report.measured.costs.draft is None


def test_model_that_cannot_roll_back_is_reported(mamba_model: Path) -> None:
    report = examine([mamba_model], [mamba_model])
    assert report is not None
    assert report.target.rolls_back is False
    assert report.measured is not None
    assert report.measured.predictions == ()
    assert report.measured.choice is None
    assert all("cut back" in findings.problem for findings in report.measured.exact)


def test_mismatching_pair_is_not_measured(chat_model: Path, mismatched: Path) -> None:
    report = examine([chat_model], [mismatched])
    assert report is not None
    assert report.measured is None
    assert report.mismatch is not None
    assert "token 256 is 'he' in the target and 'hi' in the draft" in report.mismatch


def test_what_is_known_before_the_search_is_told_at_once(
    chat_model: Path, chat_draft: Path
) -> None:
    told: list[Report] = []
    report = examine([chat_model], [chat_draft], tell=told.append)
    (known,) = told
    assert known.interrupted
    assert not report.interrupted
    assert known.measured is not None
    assert report.measured is not None
    assert known.measured.exact == ()
    assert known.measured.predictions == report.measured.predictions != ()


def test_stop_ends_the_search(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lspec.selfcheck._read", lambda path: None)
    told: list[Report] = []
    report = examine([chat_model], [], tell=told.append, should_stop=lambda: bool(told))
    assert report.interrupted
    assert report.measured is not None
    assert report.measured.exact == ()
    assert report.measured.costs.draft is None
    with pytest.raises(KeyboardInterrupt):  # nothing is known yet
        examine([chat_model], [], should_stop=lambda: True)


@pytest.mark.parametrize("costs", [MEMORY_BOUND, COMPUTE_BOUND, BETWEEN])
def test_predictions_are_those_of_the_best_gamma(costs: Any) -> None:
    found = predict(costs)
    assert [p.acceptance_rate for p in found] == list(ALPHAS)
    for p in found:
        gains = [
            theory.improvement_factor(
                theory.tau(p.acceptance_rate, gamma),
                gamma,
                c=costs.cost_coefficient,
                v=costs.verify_cost(gamma),
            )
            for gamma in range(17)
        ]
        assert p.improvement_factor == max(gains) == gains[p.gamma]
    assert found[-1].gamma > 4 if costs is MEMORY_BOUND else True
    assert found[0].gamma == 0 or costs is not COMPUTE_BOUND
    assert predict(replace(costs, draft=None)) == []


@pytest.mark.parametrize("matches", [True, False])
def test_what_does_not_fit_is_reported_and_nothing_is_loaded(
    chat_model: Path,
    chat_draft: Path,
    mismatched: Path,
    monkeypatch: pytest.MonkeyPatch,
    matches: bool,
) -> None:
    monkeypatch.setattr("lspec.planning.free_memory", lambda: 10**6)
    for name in ("lspec.check.require_loadable", "lspec.opening.LlamaModel"):
        monkeypatch.setattr(name, None)
    report = examine([chat_model], [chat_draft if matches else mismatched])
    assert report is not None
    assert report.measured is None
    assert report.refusal == "Take a smaller model. force=True loads it all the same."
    assert (report.mismatch is None) is matches
    assert not report.memory.free.holds(report.memory.plan)


def test_models_are_loaded_as_they_are_asked_for(
    chat_model: Path, chat_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lspec.check._COSTS_S", 0.05)
    surveyed: list[tuple[LoadOptions, str | None]] = []

    def survey(files: Any, options: LoadOptions, kv_type: str | None, **kwargs: Any) -> list[Any]:
        surveyed.append((options, kv_type))
        return []

    monkeypatch.setattr("lspec.check.survey", survey)
    report = examine(
        [chat_model], [chat_draft], n_ctx=512, draft_n_ctx=300, kv_type="f16", n_threads=2
    )
    assert report is not None
    assert report.measured is not None
    assert report.measured.device == "on the CPU with 2 threads"
    assert [model.n_ctx for model in report.memory.plan.models] == [512, 300]
    ((options, kv_type),) = surveyed
    assert (options.n_ctx, options.n_threads, kv_type) == (512, 2, "f16")
    with pytest.raises(RequestError, match="n_ctx must be"):
        examine([chat_model], [], n_ctx=0)


# -- how it is said --

REPORT = Report(
    Facts(("/models/big.gguf",), 3_000_000_000, True),
    Facts(("/models/small-1.gguf", "/models/small-2.gguf"), 90_000_000, True),
    None,
    Measured(
        "on the GPU",
        replace(MEMORY_BOUND, target=tuple(0.05 * s for s in MEMORY_BOUND.target)),
        0.51,
        (Prediction(0.6, 3, 1.5), Prediction(0.8, 12, 2.25)),
        (
            Findings(
                "f16",
                Widths(
                    ((1,), WIDTHS[1:7], *((w,) for w in WIDTHS[7:9]), WIDTHS[9:]), (0.51,), (40,)
                ),
            ),
            Findings("q8_0", None, problem="it does not fit"),
        ),
        Choice("f16", WIDTHS[1:7]),
        2_000_000_000,
    ),
    ON_CPU,
)
SAID = """\
target  big.gguf, 3.00 GB, takes back drafted tokens
draft   small-1.gguf, small-2.gguf, 90.00 MB, takes back drafted tokens
Their vocabularies match.

A step of the target takes 50 ms on the GPU: 20.0 tok/s plainly.
A step of the draft takes 100 ms: c = 2.00.
gamma                     1     2     4     8
v, cost of a verify pass  1.01  1.02  1.05  1.10

tokens accepted (alpha)  best gamma  predicted gain
60%                      3           1.50
80%                      12          2.25

Pass widths whose logits agree bit for bit:
cache  agree             alone      largest difference
f16    2 to 7; 10 to 17  1, 8 to 9  0.51
Not to be found with a cache of q8_0: it does not fit.
Width moves this target's logits by up to 0.51, so greedy text may differ
from plain decoding at ties closer than that.
Exact mode takes a cache of f16 and passes of 2 to 7 tokens, so that up to 6 can be drafted.

"""
SAID += f"{MEMORY_SAID}\nThis check used 2.00 GB at most.\n"


def say(
    report: Report, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str
) -> str:
    monkeypatch.setattr(command, "examine", lambda *args, **kwargs: report)
    return printed(capsys, "--target", "x", *args)[1]


def test_report_for_people(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "survey", lambda: Offload("0.3.36", ("CPU",), (), ()))
    build = (
        "llama-cpp-python 0.3.36 is built for the CPU alone.\n"
        "It uses no GPU, and none was found on this machine.\n"
    )
    assert say(REPORT, capsys, monkeypatch) == f"{SAID}\n{build}"


def test_other_outcomes_of_exact_mode(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert REPORT.measured is not None

    def with_exact(found: Findings, choice: Choice | None, apart: float = 0.1) -> str:
        measured = replace(
            REPORT.measured,
            exact=(found,),
            choice=choice,
            width_difference=apart,
            peak_bytes=None,
        )
        return say(replace(REPORT, measured=measured), capsys, monkeypatch)

    whole = Findings("f16", Widths((WIDTHS,), (0.0,), (40,)))
    same = with_exact(whole, Choice("f16", WIDTHS), 0.0)
    assert "does not move this target's logits" in same
    assert "up to 16 can be drafted" in same
    assert "This check used" not in same
    plain = with_exact(Findings("f16", Widths(((1,), (2, 3)), (0.1,), (40,))), Choice("f16", (1,)))
    assert "Exact mode decodes plainly here, with a cache of f16." in plain
    repacked = with_exact(replace(whole, repack=True), Choice("f16", WIDTHS, repack=True))
    assert "Exact mode takes a cache of f16, repacked weights and passes of 1 to 17" in repacked
    none = with_exact(Findings("f16", None, problem="no way"), None)
    assert "with a cache of f16: no way." in none
    assert "Exact mode is not possible here." in none


def test_json_is_one_object_with_the_same_facts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = json.loads(say(REPORT, capsys, monkeypatch, "--json"))
    assert list(result) == [
        *("target", "draft", "mismatch", "memory", "refusal", "interrupted", "build", "measured"),
    ]
    assert "CPU" in result["build"]["backends"]
    assert result["memory"] == json.loads(json.dumps(memory_object(ON_CPU)))
    assert result["target"]["files"] == ["/models/big.gguf"]
    measured = result["measured"]
    assert set(measured["verify_cost"]) == {"1", "2", "4", "8"}
    assert measured["plain_tokens_per_s"] == pytest.approx(20)
    assert measured["predictions"][0] == {
        "acceptance_rate": 0.6,
        "gamma": 3,
        "improvement_factor": 1.5,
    }
    assert measured["exact"][0]["widths"]["classes"][1] == [2, 3, 4, 5, 6, 7]
    assert measured["choice"] == {
        "kv_type": "f16",
        "widths": [2, 3, 4, 5, 6, 7],
        "repack": False,
    }


def test_only_the_report_is_on_stdout_and_what_takes_time_is_noted_once(
    chat_model: Path,
    chat_draft: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    args = ("--target", chat_model, "--draft", chat_draft)
    code, out, err = printed(capsys, *args)
    assert code == 0
    assert out.startswith("target  chat.gguf, ")
    search, further = err.splitlines()
    assert "a minute or two" in search
    assert further == "exact mode: now with a cache of q8_0"
    assert printed(capsys, *args)[2] == ""


def test_mismatch_is_exit_code_1_with_the_difference(
    chat_model: Path, mismatched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--target", chat_model, "--draft", mismatched)
    code, out, _ = printed(capsys, *args)
    assert code == 1
    assert "token 256 is 'he' in the target and 'hi' in the draft" in out
    assert "same model family" in out
    code, out, _ = printed(capsys, *args, "--json")
    assert code == 1
    assert json.loads(out)["measured"] is None


def test_pair_that_does_not_fit_is_exit_code_1_with_the_plan_and_options_of_the_command(
    chat_model: Path,
    chat_draft: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need = Planner([chat_model], [chat_draft], free=Free(None))
    room = need.outlook(LoadOptions(1024, 17)).plan.host
    monkeypatch.setattr("lspec.planning.free_memory", lambda: room)
    monkeypatch.setattr("lspec.check.require_loadable", None)
    args = ("--target", chat_model, "--draft", chat_draft)
    code, out, err = printed(capsys, *args)
    assert code == 1
    assert err == ""
    assert "Their vocabularies match." in out
    assert ": it does not fit.\n" in out
    (advice,) = (line for line in out.splitlines() if line.startswith("So nothing was measured."))
    assert "--ctx 1024" in advice
    known = {name for param in command.check.params for name in param.opts}
    assert set(re.findall(r"--[a-z-]+", advice)) <= known
    asked: list[dict[str, Any]] = []

    def heard(target: Any, draft: Any, **given: Any) -> Report:
        how = {k: v for k, v in given.items() if k not in ("say", "tell", "should_stop")}
        asked.append({"draft": list(draft), **how})
        return REPORT

    monkeypatch.setattr(command, "examine", heard)
    assert printed(capsys, *args, "--ctx", "auto", "--gpu-layers", 3)[0] == 0
    assert printed(capsys, *args, "--drafter", "ngram", "--force")[0] == 0
    assert asked == [
        {"draft": [chat_draft], "n_ctx": "auto", "n_gpu_layers": 3, "force": False},
        {"draft": [], "force": True},
    ]


def test_ctrl_c_ends_the_search_and_shows_the_rest(
    chat_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def press(*args: Any, tell: Callable[[Report], None], **kwargs: Any) -> Report:
        def tell_and_press(known: Report) -> None:
            tell(known)
            signal.raise_signal(signal.SIGINT)

        return examine(*args, tell=tell_and_press, **kwargs)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(command, "examine", press)
    code, out, _ = printed(capsys, "--target", chat_model)
    assert code == 130
    assert "A step of the target takes" in out
    assert "was not found out: interrupted." in out
    assert "Exact mode" not in out
    assert "it takes" in out, "the memory plan"


def test_wrong_files_are_the_errors_that_they_are_elsewhere(
    chat_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestError, match="not both"):
        printed(capsys, "a-pair", "--target", chat_model)
    with pytest.raises(RequestError, match="target file"):
        printed(capsys, "--draft", chat_model)
    with pytest.raises(LspecError, match="cannot read /no/such"):
        printed(capsys, "--target", "/no/such")


def test_command_is_there() -> None:
    done = run("check", "--help")
    assert done.returncode == 0
    assert "bit for bit" in done.stdout


@pytest.mark.parametrize(
    ("widths", "text"),
    [
        ((1,), "1"),
        ((1, 2, 3), "1 to 3"),
        ((1, 3), "1, 3"),
        ((2, 3, 7, 9, 10), "2 to 3, 7, 9 to 10"),
    ],
)
def test_ranges(widths: tuple[int, ...], text: str) -> None:
    assert ranges(widths) == text
