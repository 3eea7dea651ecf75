"""The memory plan of files, before and while they are loaded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

import lspec
from lspec.errors import ModelLoadError, RequestError
from lspec.fitting import Free
from lspec.llama import GPU_SPARE_BYTES, LlamaModel, LoadOptions
from lspec.llama.ggml import Device
from lspec.planning import Planner, default_options, free_here
from lspec.selfcheck import Choice

OPTIONS = default_options()
GB = 10**9
PLENTY = Free(10**12)


def planned(target: Path, draft: Path, **how: object) -> tuple[int, int]:
    """Return the windows of target and draft that a planner settles on."""
    planner = Planner([target], [draft], **how)  # type: ignore[arg-type]
    settled = planner.settle(OPTIONS, OPTIONS)
    if settled.refusal:
        raise settled.refusal
    return settled.target.n_ctx, settled.draft.n_ctx


def need(target: Path, draft: Path, n_ctx: int) -> int:
    planner = Planner([target], [draft], free=PLENTY)
    return planner.outlook(replace(OPTIONS, n_ctx=n_ctx)).plan.host


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What the machine says that it has; can be changed."""
    said = {"host": 10**12}
    monkeypatch.setattr("lspec.planning.free_memory", lambda: said["host"])
    return said


def test_this_machine_has_memory() -> None:
    free = free_here(OPTIONS)
    assert free.host is None or free.host > 10**6
    assert free.gpu is None


def test_gpus_are_asked_only_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("CUDA0", "", "gpu", "CUDA", memory_total=9 * GB, memory_free=GB)
    full = replace(gpu, memory_free=GPU_SPARE_BYTES - 1)
    silent = replace(gpu, memory_total=0, memory_free=0)
    monkeypatch.setattr("lspec.llama.native.gpus", lambda: (gpu, silent, full, gpu))
    on_cpu = replace(OPTIONS, n_gpu_layers=0)
    assert free_here(on_cpu).gpu is None
    free = free_here(OPTIONS)
    assert (free.gpu, free.unified) == (2 * (GB - GPU_SPARE_BYTES), False)
    monkeypatch.setattr("lspec.llama.native.gpus", lambda: (silent,))
    assert free_here(OPTIONS).gpu is None
    inside = replace(gpu, kind="integrated")
    monkeypatch.setattr("lspec.llama.native.gpus", lambda: (inside,))
    assert free_here(OPTIONS).unified


def test_auto_takes_the_largest_window_in_nine_tenths(chat_model: Path, chat_draft: Path) -> None:
    free = int(need(chat_model, chat_draft, 2048) / 0.9) + 1
    assert planned(chat_model, chat_draft, auto=True, free=Free(free)) == (2048, 2048)
    assert planned(chat_model, chat_draft, auto=True, free=PLENTY) == (4096, 4096)


def test_auto_takes_all_where_nine_tenths_hold_nothing(chat_model: Path, chat_draft: Path) -> None:
    free = Free(need(chat_model, chat_draft, 1024))
    assert planned(chat_model, chat_draft, auto=True, free=free) == (1024, 1024)


def test_auto_leaves_a_draft_its_own_window(chat_model: Path, chat_draft: Path) -> None:
    planner = Planner([chat_model], [chat_draft], auto=True, shares_window=False, free=PLENTY)
    settled = planner.settle(OPTIONS, replace(OPTIONS, n_ctx=300))
    assert [of.n_ctx for of in (settled.target, settled.draft)] == [4096, 300]


def test_auto_keeps_the_default_where_the_system_does_not_tell(
    chat_model: Path, chat_draft: Path
) -> None:
    assert planned(chat_model, chat_draft, auto=True, free=Free(None)) == (4096, 4096)


def test_auto_refuses_where_no_window_fits(chat_model: Path, chat_draft: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"chat.gguf with chat-draft.gguf with a window of 256"
    ):
        planned(chat_model, chat_draft, auto=True, free=Free(10**6))
    forced = planned(chat_model, chat_draft, auto=True, force=True, free=Free(10**6))
    assert forced == (256, 256)


def test_parts_that_llama_cpp_finds_by_itself_count(tmp_path: Path) -> None:
    files = tiny.write_split_chat_model(tmp_path)
    plans = [Planner(names, [], free=PLENTY).outlook(OPTIONS).plan for names in (files, files[:1])]
    assert plans[0] == plans[1]


def test_loading_refuses_what_does_not_fit_before_anything_is_tried(
    chat_model: Path,
    chat_draft: Path,
    room: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room["host"] = need(chat_model, chat_draft, 1024)
    monkeypatch.setattr("lspec.opening.require_loadable", None)
    with pytest.raises(
        ModelLoadError, match=r"a window of 4096 tokens needs .* are free"
    ) as caught:
        lspec.load(target=chat_model, draft=chat_draft)
    assert "n_ctx=1024" in caught.value.hint


def test_what_a_refusal_advises_loads(
    chat_model: Path, chat_draft: Path, room: dict[str, int]
) -> None:
    room["host"] = need(chat_model, chat_draft, 1024)
    with pytest.raises(ModelLoadError) as caught:
        lspec.load(target=chat_model, draft=chat_draft)
    window = re.search(r"\bn_ctx=(\d+)", caught.value.hint)
    assert window is not None
    with lspec.load(target=chat_model, draft=chat_draft, n_ctx=int(window[1])) as engine:
        assert engine.n_ctx == 1024


def test_force_loads_it_all_the_same(chat_model: Path, room: dict[str, int]) -> None:
    room["host"] = 10**6
    with lspec.load(target=chat_model, drafter="none", n_ctx=512, force=True) as engine:
        assert engine.n_ctx == 512


@pytest.mark.parametrize("exact", [False, True])
def test_what_does_not_fit_is_not_repacked_unless_a_text_depends_on_it(
    chat_model: Path, chat_draft: Path, exact: bool
) -> None:
    wanted = replace(OPTIONS, repack=True)
    for host, repacks in ((10**12, True), (10**6, exact)):
        planner = Planner([chat_model], [chat_draft], free=Free(host), force=True)
        settled = planner.settle(wanted, wanted, exact=exact)
        assert (settled.target.repack, settled.draft.repack) == (repacks, repacks)


def test_auto_window_of_an_engine(chat_model: Path, chat_draft: Path, room: dict[str, int]) -> None:
    room["host"] = int(need(chat_model, chat_draft, 768) / 0.9) + 1
    with lspec.load(target=chat_model, draft=chat_draft, n_ctx="auto", gamma=2) as engine:
        assert engine.n_ctx == 768
        assert engine.draft is not None
        assert engine.draft.model.n_ctx == 768
        assert engine.generate("Hello", max_tokens=8, temperature=0.0).tokens


def test_draft_with_a_window_of_its_own(
    chat_model: Path, chat_draft: Path, room: dict[str, int]
) -> None:
    with lspec.load(
        target=chat_model, draft=chat_draft, n_ctx="auto", draft_n_ctx=512, gamma=2
    ) as engine:
        assert engine.draft is not None
        assert (engine.n_ctx, engine.draft.model.n_ctx) == (4096, 512)


def test_exact_mode_plans_with_the_largest_cache_that_it_may_choose(
    chat_model: Path, room: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lspec.opening.choose", lambda *args, **kwargs: Choice("f16", (1, 2, 3)))
    loaded: list[int] = []

    class Watched(LlamaModel):
        def __init__(self, paths: object, options: object, **more: Any) -> None:
            loaded.append(options.n_ctx + options.spare)  # type: ignore[attr-defined]
            super().__init__(paths, options, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("lspec.opening.LlamaModel", Watched)
    room["host"] = int(Planner([chat_model], [], free=PLENTY).outlook(OPTIONS).plan.host / 0.9)
    with lspec.load(
        target=chat_model, n_ctx="auto", gamma=2, exact=True, drafter="ngram"
    ) as engine:
        assert engine.n_ctx <= 4096 - 256  # the spare cells have their place as well
    assert loaded == [engine.n_ctx + 3]


@pytest.mark.parametrize("n_ctx", ["many", "", 0, -1])
def test_windows_that_make_no_sense(chat_model: Path, n_ctx: int | str) -> None:
    with pytest.raises(RequestError, match="n_ctx must be"):
        lspec.load(target=chat_model, n_ctx=n_ctx)


@pytest.mark.parametrize("given", [{"draft_n_ctx": 300}, {"draft_n_gpu_layers": 0}])
def test_options_of_a_draft_that_is_not_there_are_noted_once(
    chat_model: Path, given: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    lspec.load(target=chat_model, drafter="none", n_ctx=256, **given).close()  # type: ignore[arg-type]
    said = [record.getMessage() for record in caplog.records]
    assert said == ["there is no draft model, so that options for one have no effect"]


# -- on the GPU --


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lspec.planning.can_offload", lambda: True)


def on_gpu(files: list[Path], options: LoadOptions) -> int:
    """Return what a model takes of a GPU that holds whatever is asked of it."""
    return Planner(files, [], free=PLENTY).outlook(options).plan.gpu


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize("asked", [-1, 3, 99])
def test_layers_are_as_many_as_the_gpu_has_room_for(chat_model: Path, asked: int) -> None:
    for n in range(4):
        room = on_gpu([chat_model], replace(OPTIONS, n_gpu_layers=n))
        planner = Planner([chat_model], [], free=Free(10**12, room), force=n % 2 == 0)
        settled = planner.settle(replace(OPTIONS, n_gpu_layers=asked), OPTIONS)
        assert settled.refusal is None
        assert settled.target.n_gpu_layers == (-1 if n == 3 else n)
        assert (
            settled.notice.partition(": ")[2]
            == (
                "the target goes to the CPU",
                "1 of the target's 3 layers go there",
                "2 of the target's 3 layers go there",
                "",
            )[n]
        )


@pytest.mark.usefixtures("with_gpu")
def test_draft_that_leaves_the_gpu_is_named(chat_model: Path, chat_draft: Path) -> None:
    planner = Planner([chat_model], [chat_draft], free=Free(10**12, 10**6))
    settled = planner.settle(OPTIONS, OPTIONS)
    assert [of.n_gpu_layers for of in (settled.target, settled.draft)] == [0, 0]
    assert settled.notice == (
        "the GPU has no room for everything: the target goes to the CPU and the draft goes to the "
        "CPU, where drafting may not pay"
    )
    unwanted = planner.settle(OPTIONS, replace(OPTIONS, n_gpu_layers=0))
    assert "draft" not in unwanted.notice


@pytest.mark.usefixtures("with_gpu")
def test_memory_alone_is_a_reason_to_refuse(chat_model: Path) -> None:
    planner = Planner([chat_model], [], free=Free(10**6, 10**6))
    refusal = planner.settle(OPTIONS, OPTIONS).refusal
    assert "of memory, where 1.00 MB are free" in str(refusal)
    assert "GPU" not in str(refusal)


@pytest.mark.usefixtures("with_gpu")
def test_auto_leaves_layers_on_the_cpu_before_the_window_is_short(chat_model: Path) -> None:
    room = int(on_gpu([chat_model], replace(OPTIONS, n_gpu_layers=1)) / 0.9) + 1
    planner = Planner([chat_model], [], auto=True, free=Free(10**12, room))
    settled = planner.settle(OPTIONS, OPTIONS)
    assert settled.target.n_gpu_layers == 1
    assert settled.target.n_ctx == 4096


@pytest.mark.usefixtures("with_gpu")
def test_exact_mode_is_placed_without_looking_at_the_draft(
    chat_model: Path, chat_draft: Path
) -> None:
    room = Free(10**12, on_gpu([chat_model], OPTIONS))
    found = [
        Planner([chat_model], draft, free=room).settle(OPTIONS, OPTIONS, exact=True)
        for draft in ([], [chat_draft])
    ]
    assert [settled.target.n_gpu_layers for settled in found] == [-1, -1]
    assert found[1].draft.n_gpu_layers == 0
    less = Planner([chat_model], [], free=replace(room, gpu=(room.gpu or 0) - 1))
    assert less.settle(OPTIONS, OPTIONS, exact=True).target.n_gpu_layers == 1


@pytest.mark.usefixtures("with_gpu")
def test_gpu_is_heeded_where_the_system_does_not_tell_its_memory(chat_model: Path) -> None:
    room = on_gpu([chat_model], replace(OPTIONS, n_gpu_layers=1))
    planner = Planner([chat_model], [], auto=True, free=Free(None, room))
    settled = planner.settle(OPTIONS, OPTIONS)
    assert (settled.target.n_gpu_layers, settled.target.n_ctx) == (1, OPTIONS.n_ctx)
    assert settled.refusal is None
