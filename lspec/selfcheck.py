"""Exact mode's self-check: which pass widths of a target agree, and which to keep to.

The search takes a minute or two on a CPU, so what it finds is remembered. The choice depends on the
target and the machine alone, never on a draft: another draft must not change the text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import cycle, islice
from pathlib import Path

from lspec import prompts, theory, widths
from lspec.costs import Seconds, measure
from lspec.errors import GpuMemoryError, ModelLoadError, RollbackError
from lspec.llama import KvType, LlamaModel, LoadOptions, build, repacks
from lspec.machine import usable_cores
from lspec.paths import cache_dir, write_whole
from lspec.widths import CONTEXTS, ROWS, WIDTHS, Widths

log = logging.getLogger("lspec")

KV_TYPES: tuple[KvType, ...] = ("f16", "q8_0")  # the first one is what every model can have
_LENGTH = CONTEXTS[-1] + ROWS  # of the text that the widths are compared on
_NOTICE = (
    "exact mode: looking for pass widths that agree bit for bit, once for this model and machine "
    "(a minute or two; on a slow machine, five)"
)
_COSTS_S = 2.0  # for timing passes
_PLAIN = 0.9  # a class that never drafts must be faster than this says: copies are worth something
_ALPHA, _STEP = 0.8, 0.2  # a good draft: its acceptance rate, and a step in steps of the target


@dataclass(frozen=True, slots=True)
class Findings:
    """What is known of a target with one type of cache, its weights repacked or not.

    `seconds` are those of passes by width. Without `widths`, `problem` is a clause that says why.
    """

    kv_type: KvType
    widths: Widths | None
    seconds: Seconds = ()
    problem: str = ""
    repack: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all widths agree."""
        return self.widths is not None and len(self.widths.classes) == 1


@dataclass(frozen=True, slots=True)
class Choice:
    """What exact mode keeps to."""

    kv_type: KvType
    widths: tuple[int, ...]
    repack: bool = False


def choose(
    files: Sequence[Path],
    options: LoadOptions,
    kv_type: KvType | None = None,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> Choice:
    """Return the cache type and the widths that promise the most tokens per second.

    `kv_type` leaves no choice of the first; that of `options` does not count. Raises ModelLoadError
    also where no two widths agree, and KeyboardInterrupt if `should_stop` ended the search.
    """
    found = survey(files, options, kv_type, should_stop=should_stop)
    if found is None:
        raise KeyboardInterrupt
    choice = best(found)
    if choice is None:
        raise ModelLoadError(
            f"exact mode is not possible here: {_why_not(found)}",
            hint="Without exact mode the target's law is kept all the same.",
        )
    if choice.widths == (1,):
        log.info("exact mode decodes plainly here: drafting would not pay")
    return choice


def survey(
    files: Sequence[Path],
    options: LoadOptions,
    kv_type: KvType | None = None,
    *,
    announce: Callable[[str], None] = log.warning,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Findings] | None:
    """Return what is remembered, or found out now, of each way to load it that is worth having.

    The type of the cache is `kv_type` where it is given. `announce` is told before each way that
    has to be looked at. None if `should_stop` ended it. Raises ModelLoadError.
    """
    found: list[Findings] = []
    announced = False
    for way in _ways(files, options, kv_type, found):
        path = _path(files, way)
        findings = _read(path)
        if findings is None:
            announce(f"exact mode: now with {_name(way)}" if announced else _NOTICE)
            announced = True
            findings = _examine(files, way, should_stop)
            if findings is None:
                return None
            _write(path, findings)
        found.append(findings)
    return found


def _ways(
    files: Sequence[Path],
    options: LoadOptions,
    kv_type: KvType | None,
    found: Sequence[Findings],
) -> Iterator[LoadOptions]:
    """Yield the ways to load a target that are worth a look; `found` is what the last ones showed.

    Repacked weights with one type of cache only, to stay within two minutes: the last that goes,
    with which single steps are most likely to agree with wider passes.
    """
    for name in (kv_type,) if kv_type else KV_TYPES:
        if not (found and found[-1].is_whole):  # no class can be larger
            yield replace(options, kv_type=name, repack=False)
    if repacks(files, options):
        usable = [findings.kv_type for findings in found if findings.widths]
        yield replace(options, kv_type=usable[-1] if usable else found[0].kv_type)


def _name(way: LoadOptions) -> str:
    return f"a cache of {way.kv_type}{' and repacked weights' * way.repack}"


def best(found: Sequence[Findings]) -> Choice | None:
    """Return the fastest class of all; None where no class has two widths."""
    candidates = [
        (findings, group)
        for findings in found
        if findings.widths
        for group in findings.widths.classes
        if len(group) > 1 or group == (1,)  # of another one, nothing shows that all places agree
    ]
    if all(len(group) == 1 for _, group in candidates):
        return None

    def worth(item: tuple[Findings, tuple[int, ...]]) -> float:
        findings, group = item
        return tokens_per_s(findings.seconds, group) * (_PLAIN if group == (1,) else 1.0)

    findings, group = max(candidates, key=worth)
    return Choice(findings.kv_type, group, findings.repack)


def tokens_per_s(seconds: Seconds, group: Sequence[int]) -> float:
    """Return what the widths `group` promise with a good draft, or plainly where that is more.

    `seconds` are those of passes by width; a pass is padded to the next width of the group.
    """

    def rate(gamma: int) -> float:
        width = next(width for width in group if width > gamma)
        cost = gamma * _STEP * seconds[0] + seconds[width - 1]
        return theory.tau(_ALPHA, gamma) / cost

    return max(map(rate, range(group[-1])))


def _examine(
    files: Sequence[Path], options: LoadOptions, should_stop: Callable[[], bool]
) -> Findings | None:
    """Load the target, compare widths and time passes; None if it was stopped."""
    options = replace(options, n_ctx=_LENGTH + WIDTHS[-1], max_rows=WIDTHS[-1], spare=0)
    try:
        model = LlamaModel(files, options)
    except ModelLoadError as error:
        if options.kv_type == KV_TYPES[0] or isinstance(error, GpuMemoryError):
            raise
        return Findings(options.kv_type, None, problem=str(error), repack=options.repack)
    try:
        found = widths.find(model, sample_text(model), should_stop=should_stop)
        if found is None:
            return None
        if not found.contexts:
            problem = "the window is too small for a comparison"
            return Findings(options.kv_type, None, problem=problem, repack=options.repack)
        seconds = measure(model, None, budget_s=_COSTS_S).target
    except RollbackError as error:
        return Findings(options.kv_type, None, problem=str(error), repack=options.repack)
    finally:
        model.close()
    return Findings(options.kv_type, found, seconds, repack=options.repack)


def sample_text(model: LlamaModel) -> list[int]:
    """Return real text, as often as it takes; any ids for a model without a vocabulary."""
    if model.vocab.kind == "none":
        return [(3 + 7919 * i) % model.n_vocab for i in range(_LENGTH)]
    texts = (m["content"] for prompt in prompts.read(prompts.BUILT_IN) for m in prompt.messages)
    tokens = model.vocab.tokenize("\n".join(texts), bos=False, special=False)
    return list(islice(cycle(tokens), _LENGTH))


def _why_not(found: Sequence[Findings]) -> str:
    apart = [max(findings.widths.difference) for findings in found if findings.widths]
    if not apart:
        return found[0].problem
    return f"logits of different pass widths differ by up to {max(apart):.2g}"


def _path(files: Sequence[Path], options: LoadOptions) -> Path:
    """Return where findings are kept: the name stands for all that they depend on."""
    threads = options.n_threads or usable_cores()
    identity = (
        (build(), threads, options.placement, options.kv_type),
        (WIDTHS, ROWS, CONTEXTS),
        [(str(path.resolve()), _state(path)) for path in files],
    )
    return cache_dir() / "exact" / f"{sha256(repr(identity).encode()).hexdigest()[:32]}.json"


def _state(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except OSError:  # it cannot be loaded either
        return None
    return state.st_size, state.st_mtime_ns


def _read(path: Path) -> Findings | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        found = fields["widths"]
        return Findings(
            fields["kv_type"],
            found
            and Widths(
                tuple(map(tuple, found["classes"])),
                tuple(found["difference"]),
                tuple(found["contexts"]),
            ),
            tuple(fields["seconds"]),
            fields["problem"],
            fields["repack"],
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _write(path: Path, findings: Findings) -> None:
    with suppress(OSError):  # what cannot be remembered is found out again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(findings)))
