"""What the runs of a benchmark say: speculative decoding against plain decoding of the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from lspec import theory
from lspec.costs import Costs, Seconds
from lspec.drafters import KEPT, MAX_PENDING
from lspec.round import Round

ALL = "all"

Gamma = int | str


@dataclass(frozen=True, slots=True)
class Run:
    """One answer as it was decoded; `total_s` is decoding alone, the prompt excluded."""

    prompt: str  # its id
    category: str
    temperature: float
    gamma: Gamma  # 0: plain decoding
    repeat: int
    rounds: tuple[Round, ...]
    total_s: float

    @property
    def tokens(self) -> int:
        """Emitted tokens, an end-of-generation token included: it costs as much as any other."""
        return sum(len(round.tokens) for round in self.rounds)

    @property
    def target_s(self) -> float:
        """Seconds inside the target's passes."""
        return sum(round.target_s for round in self.rounds)

    @property
    def seconds_per_token(self) -> float:
        """Decoding time per emitted token."""
        return self.total_s / self.tokens


@dataclass(frozen=True, slots=True)
class Pair:
    """Plain and speculative decoding of one prompt in the same repeat."""

    plain: Run
    fast: Run

    @property
    def fast_s(self) -> float:
        """What the speculative run would have taken for as many tokens as the plain one wrote.

        Above temperature 0 the two texts differ, and so may their lengths.
        """
        return self.fast.seconds_per_token * self.plain.tokens

    @property
    def ratio(self) -> float:
        """Seconds per token, plain by speculative."""
        return self.plain.seconds_per_token / self.fast.seconds_per_token


@dataclass(frozen=True, slots=True)
class Spread:
    """The median over the repeats with the smallest and the largest value."""

    median: float
    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Spread:
        """Return the spread of `values`, one per repeat."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Row:
    """How a setting compares with plain decoding over the prompts of a category, or over all.

    `speedup` is the ratio of total times, `speedup_mean` the mean over prompts of their ratios.
    Ratios are None where they are undefined.
    """

    temperature: float
    gamma: Gamma
    category: str  # ALL: every prompt
    prompts: int
    repeats: int
    plain_tokens_per_s: Spread
    tokens_per_s: Spread
    speedup: Spread
    speedup_mean: Spread
    acceptance_rate: float | None  # alpha
    block_efficiency: float  # tau
    accepted_by_position: tuple[float | None, ...]  # of the tokens examined there
    cost_coefficient: float | None  # c, from the calibration
    verify_cost: float  # v, from the calibration, mean over the rounds
    improvement_factor: float  # predicted speedup: tau by draft steps x c + v
    best_gamma: int | None  # what alpha, c and v predict to be best
    outside_models: float  # share of the speculative runs' time


def compare(runs: Iterable[Run], costs: Costs) -> list[Row]:
    """Return the rows of each setting, its categories first, then all prompts together.

    `costs` were measured before the runs. A run without its counterpart is left out.
    """
    plain: dict[tuple[str, float, int], Run] = {}
    fast: list[Run] = []
    for run in runs:
        if run.gamma == 0:
            plain[run.prompt, run.temperature, run.repeat] = run
        else:
            fast.append(run)
    settings: dict[tuple[float, Gamma], list[Pair]] = {}
    for run in fast:
        if partner := plain.get((run.prompt, run.temperature, run.repeat)):
            pairs = settings.setdefault((run.temperature, run.gamma), [])
            pairs.append(Pair(partner, run))
    return [
        _row(category, group, costs)
        for setting in sorted(settings, key=_order)
        for category, group in _by_category(settings[setting])
    ]


def _order(setting: tuple[float, Gamma]) -> tuple[float, float]:
    temperature, gamma = setting
    return temperature, gamma if isinstance(gamma, int) else float("inf")


def _by_category(pairs: Sequence[Pair]) -> Iterator[tuple[str, list[Pair]]]:
    """Yield the categories with their pairs, unless there is only one; then all."""
    categories = dict.fromkeys(pair.fast.category for pair in pairs)
    for category in categories if len(categories) > 1 else ():
        yield category, [pair for pair in pairs if pair.fast.category == category]
    yield ALL, list(pairs)


def _row(category: str, pairs: Sequence[Pair], costs: Costs) -> Row:
    repeats = _complete_repeats(pairs)
    runs = [pair.fast for group in repeats for pair in group]
    rounds = [round for run in runs for round in run.rounds]
    alpha = acceptance_rate(rounds)
    c, v = costs.cost_coefficient, fmean(costs.verify_cost(round.width - 1) for round in rounds)
    block_efficiency = sum(run.tokens for run in runs) / len(rounds)
    verify_costs = [costs.verify_cost(gamma) for gamma in range(len(costs.target))]
    inside = sum(round.draft_s + round.target_s for round in rounds)
    return Row(
        temperature=runs[0].temperature,
        gamma=runs[0].gamma,
        category=category,
        prompts=len(repeats[0]),
        repeats=len(repeats),
        plain_tokens_per_s=Spread.over([_tokens(g) / _plain_s(g) for g in repeats]),
        tokens_per_s=Spread.over([_tokens(g) / _fast_s(g) for g in repeats]),
        speedup=Spread.over([_plain_s(g) / _fast_s(g) for g in repeats]),
        speedup_mean=Spread.over([fmean(pair.ratio for pair in g) for g in repeats]),
        acceptance_rate=alpha,
        block_efficiency=block_efficiency,
        accepted_by_position=accepted_by_position(rounds),
        cost_coefficient=c,
        verify_cost=v,
        improvement_factor=theory.improvement_factor(
            block_efficiency, _draft_steps(runs, costs.draft) / len(rounds), c=c or 0.0, v=v
        ),
        best_gamma=None
        if alpha is None or c is None
        else theory.best_gamma(alpha, c=c, v=verify_costs),
        outside_models=1 - inside / sum(run.total_s for run in runs),
    )


def _complete_repeats(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Return the pairs by repeat, without the repeat that an interruption left short."""
    repeats: dict[int, list[Pair]] = {}
    for pair in pairs:
        repeats.setdefault(pair.fast.repeat, []).append(pair)
    most = max(map(len, repeats.values()))
    return [group for group in repeats.values() if len(group) == most]


def _tokens(pairs: Sequence[Pair]) -> int:
    return sum(pair.plain.tokens for pair in pairs)


def _plain_s(pairs: Sequence[Pair]) -> float:
    return sum(pair.plain.total_s for pair in pairs)


def _fast_s(pairs: Sequence[Pair]) -> float:
    return sum(pair.fast_s for pair in pairs)


def acceptance_rate(rounds: Sequence[Round]) -> float | None:
    """Return alpha: accepted / (accepted + rejections); None if no token was examined."""
    accepted = sum(round.accepted for round in rounds)
    examined = accepted + sum(round.rejected for round in rounds)
    return accepted / examined if examined else None


def accepted_by_position(rounds: Sequence[Round]) -> tuple[float | None, ...]:
    """Return how often the drafted token at each position was accepted when it was examined.

    What lies behind a rejection was never examined. None: nothing ever was at that position.
    """
    result: list[float | None] = []
    for position in range(max((round.drafted for round in rounds), default=0)):
        reached = [r for r in rounds if r.drafted > position and r.accepted >= position]
        accepted = sum(round.accepted > position for round in reached)
        result.append(accepted / len(reached) if reached else None)
    return tuple(result)


def _draft_steps(runs: Iterable[Run], draft: Seconds | None) -> float:
    """Return what the draft's passes should have cost, in steps of one token."""
    if draft is None:
        return 0.0

    def steps(width: int) -> float:
        within = min(width, len(draft))
        return draft[within - 1] / draft[0] * width / within

    return sum(steps(width) for run in runs for width in draft_widths(run.rounds))


def draft_widths(rounds: Iterable[Round]) -> Iterator[int]:
    """Yield the tokens of each pass of the draft model in one answer.

    The first pass of a round also reads what the draft has not seen yet: the last drafted token of
    a round accepted in full, copied tokens, the text of rounds in which it did not draft.
    """
    pending = 1
    for round in rounds:
        if round.draft_steps == 0:
            pending += len(round.tokens)
            continue
        if pending > MAX_PENDING:
            pending = KEPT
        widths = list(round.draft_widths(pending))
        yield from widths
        known = sum(widths) - pending  # drafted tokens in the draft's cache
        pending = 1 + round.accepted - min(round.accepted, known)
