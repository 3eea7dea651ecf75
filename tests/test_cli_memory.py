"""How the memory plan is said."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lspec.cli.memory import memory_lines, memory_object, memory_sentence
from lspec.fitting import Free, Outlook
from lspec.memory import MemoryPlan, ModelPlan, Part

MB = 10**6
TARGET = ModelPlan(4096, "q8_0", 29, 0, Part(1000 * MB, 60 * MB, 14 * MB, 10 * MB, 55 * MB), Part())
DRAFT = ModelPlan(512, "q8_0", 25, 0, Part(400 * MB, 30 * MB, 8 * MB, 2 * MB, 50 * MB), Part())
HALF = ModelPlan(
    4096, "f16", 29, 20, Part(300 * MB, 0, MB, MB, 50 * MB), Part(700 * MB, 40 * MB, 200 * MB)
)
ON_CPU = Outlook(
    MemoryPlan(TARGET, DRAFT, process=100 * MB),
    Free(8000 * MB),
    {"f16": 8192, "q8_0": 16384},
    longest=32768,
)
ON_GPU = Outlook(
    MemoryPlan(HALF, None, process=100 * MB), Free(8000 * MB, 900 * MB), {"f16": 0}, longest=8192
)

SAID = """\
Memory with a cache of q8_0:
             weights     cache   buffers  vocabulary   in all
target       1.00 GB  60.00 MB  24.00 MB    55.00 MB  1.14 GB
draft        0.40 GB  30.00 MB  10.00 MB    50.00 MB  0.49 GB
the program                                           0.10 GB
With a window of 4096 tokens it takes 1.73 GB of memory (8.00 GB free).
The model's window is 32768 tokens; the largest that fits: 8192 with f16, 16384 with q8_0."""


def test_plan_for_people() -> None:
    assert "\n".join(memory_lines(ON_CPU)) == SAID


def test_plan_with_a_gpu() -> None:
    lines = [*memory_lines(ON_GPU)]
    assert [line.split()[0] for line in lines[2:5]] == ["target", "20", "the"]
    assert lines[3].split()[-1] == "GB"
    assert memory_sentence(ON_GPU) == (
        "With a window of 4096 tokens it takes 0.45 GB of memory (8.00 GB free) and "
        "0.94 GB on the GPU (0.90 GB free): it does not fit."
    )
    assert lines[-1] == memory_sentence(ON_GPU)  # no window fits


def test_memory_that_is_shared_with_the_gpu_counts_as_one() -> None:
    shared = replace(ON_GPU, free=Free(8000 * MB, 950 * MB, unified=True))
    assert "it takes 1.39 GB of memory (8.00 GB free) and 0.94 GB" in memory_sentence(shared)


def test_what_is_free_is_left_out_where_it_is_not_known() -> None:
    unknown = replace(ON_CPU, free=Free(None))
    assert memory_sentence(unknown) == ("With a window of 4096 tokens it takes 1.73 GB of memory.")
    assert "that fits" not in "\n".join(memory_lines(unknown))


@pytest.mark.parametrize("outlook", [ON_CPU, ON_GPU])
def test_plan_as_json(outlook: Outlook) -> None:
    found = json.loads(json.dumps(memory_object(outlook)))
    plan = outlook.plan
    assert found["target"]["host"]["weights"] == plan.target.host.weights
    assert ("draft" in found) == (plan.draft is not None)
    assert found["host"] == {"process": 100 * MB, "total": plan.host, "free": 8000 * MB}
    assert found["gpu"] == {"total": plan.gpu, "free": outlook.free.gpu}
    assert found["fits"] is (outlook is ON_CPU)
    assert found["largest_window"] == outlook.windows
