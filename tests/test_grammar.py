"""Answers that follow a grammar: every one does, by the law of masked sampling; and the errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from laws import P_MIN, fit, joint_law, softmax
from loop import Loop
from table import TableModel
from test_cli import run

import lspec
from lspec.controller import Controller, Plan
from lspec.decoder import Decoder
from lspec.distribution import Distribution, IdArray
from lspec.drafters import ModelDrafter
from lspec.errors import DecodeError, RequestError
from lspec.grammar import Grammars
from lspec.llama import LlamaModel, LoadOptions, Vocab
from lspec.round import Proposal, Source
from lspec.sampling import ChainSampler, Constraint, Sampler
from lspec.verify import RULES, Rule

# -- the law, over four tokens and a grammar written by hand --

PROMPT = (1, 2, 0)
SAMPLES = 3000
FOLLOWS = {0: (0, 1, 2), 1: (0, 2, 3), 2: (1,), 3: (2, 3)}


def follows(text: Sequence[int]) -> tuple[int, ...]:
    """Return what may follow an answer so far: 2 leaves no choice but 1, and then 0."""
    if tuple(text[-2:]) == (2, 1):
        return (0,)
    return FOLLOWS[text[-1]] if text else (0, 2, 3)


class ByHand:
    """A Constraint."""

    def __init__(self) -> None:
        self._text: list[int] = []

    def allowed(self, drafted: Sequence[int]) -> IdArray | None:
        return np.array(follows([*self._text, *drafted]), np.int32)

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        text = [*self._text, *drafted]
        start = len(text)
        while len(next_ones := follows(text)) == 1:
            text += next_ones
        return tuple(text[start:])

    def accept(self, tokens: Sequence[int]) -> None:
        self._text.extend(tokens)


@dataclass
class Constrained(Loop):
    """A loop whose every request follows the grammar."""

    def decoder(self, seed: int, *, sampler: Sampler | None = None) -> Decoder:
        n_vocab = self.target.n_vocab
        own = ChainSampler(self.params, n_vocab=n_vocab, constraint=ByHand())
        return replace(super().decoder(seed, sampler=own), drafter=self._drafter(own))


class ClaimsUnmasked(ModelDrafter):
    """The wrong variant: draws from the masked q and claims the whole one."""

    def propose(self, start: Proposal, plan: Plan, controller: Controller, rule: Rule) -> Proposal:
        whole = super().propose(start, plan, controller, rule)
        model = self._cache.model
        assert isinstance(model, TableModel)
        q = [
            None if q is None else Distribution(None, softmax(model.logits([*self._text, *before])))
            for q, before in zip(
                whole.q, (whole.tokens[:i] for i in range(len(whole.q))), strict=True
            )
        ]
        return Proposal(whole.tokens, tuple(q), whole.source)


def p_value(loop: Loop) -> float:
    """Return how well the first four emitted tokens fit plain sampling with a mask."""

    def law(prefix: tuple[int, ...]) -> np.ndarray:
        row = loop.target.logits((*PROMPT, *prefix))  # type: ignore[attr-defined]
        masked = np.full(len(row), -np.inf)
        masked[list(follows(prefix))] = row[list(follows(prefix))]
        return softmax(masked)

    return fit(loop.sample(PROMPT, n=4, samples=SAMPLES), joint_law(law, 4))


def target() -> TableModel:
    return TableModel(seed=1)


def draft() -> TableModel:
    return TableModel(seed=2)


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("rule", RULES)
def test_speculative_text_has_the_law_of_plain_masked_sampling(gamma: int, rule: str) -> None:
    make_rule = RULES[rule]  # type: ignore[index]
    loop = Constrained(target(), draft(), gamma=gamma, make_rule=make_rule)
    assert p_value(loop) > P_MIN
    rounds = loop.rounds(PROMPT, max_tokens=60)
    assert {Source.GRAMMAR, Source.DRAFT} <= {s for r in rounds for s in r.source[: r.accepted]}
    assert not any(r.rejected for r in rounds if set(r.proposed) == {Source.GRAMMAR})


def test_forced_tokens_alone_keep_the_law() -> None:
    loop = Constrained(target())
    assert p_value(loop) > P_MIN
    assert any(round.proposed for round in loop.rounds(PROMPT, max_tokens=60))


@pytest.mark.parametrize("gamma", [1, 4])
def test_a_draft_that_claims_an_unmasked_q_has_another_law(gamma: int) -> None:
    loop = Constrained(target(), draft(), gamma=gamma)
    loop.make_drafter = lambda cache, sampler: ClaimsUnmasked(cache, sampler, ends=frozenset())
    assert p_value(loop) < P_MIN


# -- every format, through llama.cpp --

ANY = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["bird", "beast", None]},
        "legs": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}},
        "home": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
    },
    "required": ["name", "kind", "legs", "home"],
    "additionalProperties": False,
}
SCHEMA["properties"]["legs"]["maxItems"] = 3  # type: ignore[index]
SCHEMA["properties"]["home"]["additionalProperties"] = False  # type: ignore[index]
CHOICES = ["yes", "no", "yes, but", 'a "q"\\\n', "grüße 🙂"]
REGEX = r"[a-c]{2,5}(-\d{1,2}){1,2}\.?"
GBNF = 'root ::= item ("," item){0,3} "!"\nitem ::= "he" [0-9]+ | "(" item ")"\n'
LARK = 'start: item ("," item){0,3} "!"\nitem: /he[0-9]+/ | "(" item ")"\n'


def is_one_line(text: str) -> bool:
    """Say whether JSON has one space behind each comma and colon, and no other white space."""
    outside = re.sub(r'"(\\.|[^"\\])*"', '""', text)
    return bool(re.fullmatch(r"([^\s,:]|[,:] )*", outside))


def fits_schema(text: str) -> bool:
    value = json.loads(text)
    legs = value["legs"]
    return (
        list(value) == ["name", "kind", "legs", "home"]
        and len(value["name"]) <= 8
        and value["kind"] in ("bird", "beast", None)
        and len(legs) <= 3
        and all(type(n) is int and 0 <= n <= 99 for n in legs)
        and value["home"] in ({"far": True}, {"far": False})
        and is_one_line(text)
    )


def follows_items(text: str) -> bool:
    item = r"\(*he[0-9]+\)*"
    balanced = all(part.count("(") == part.count(")") for part in text[:-1].split(","))
    return bool(re.fullmatch(rf"{item}(,{item}){{0,3}}!", text)) and balanced


FORMATS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json_object": (
        {"type": "json_object"},
        lambda text: type(json.loads(text)) is dict and is_one_line(text),
    ),
    "json_schema": (
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
        fits_schema,
    ),
    "regex": ({"type": "regex", "regex": REGEX}, lambda text: bool(re.fullmatch(REGEX, text))),
    "choice": ({"type": "choice", "choices": CHOICES}, CHOICES.__contains__),
    "gbnf": ({"type": "grammar", "grammar": GBNF}, follows_items),
    "lark": ({"type": "grammar", "grammar": LARK}, follows_items),
}

# The tiny models write at random: make quotes and brackets likely, so that JSON comes to an end.
SHORT = {ord('"'): 4.0, ord("}"): 5.0, ord("]"): 4.0, ord("!"): 2.0}


@pytest.fixture(scope="module", params=["model", "ngram", "none"])
def engine(
    request: pytest.FixtureRequest, chat_model: Path, chat_draft: Path
) -> Iterator[lspec.Engine]:
    with lspec.load(
        target=chat_model, draft=chat_draft, gamma=4, drafter=request.param, n_ctx=1024, n_threads=1
    ) as engine:
        yield engine


@pytest.mark.parametrize("gamma", [0, 4, "auto"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_answer_follows_its_format(engine: lspec.Engine, name: str, gamma: int | str) -> None:
    response_format, is_valid = FORMATS[name]
    for seed in range(6):
        done = engine.generate(
            "he said", response_format=response_format, seed=seed, gamma=gamma, logit_bias=SHORT,
            **ANY,
        )  # fmt: skip
        assert done.finish_reason == "stop"
        assert is_valid(done.text), done.text


def test_law_of_a_regex_through_llama_cpp(engine: lspec.Engine) -> None:
    prompt = engine.tokenize("he said")

    def law(prefix: tuple[int, ...]) -> np.ndarray:
        engine.target.truncate(0)
        row = engine.target.logits_after([*prompt, *prefix])
        letters = [b"abc", b"bcd"][len(prefix)]
        masked = np.full(len(row), -np.inf)
        masked[list(letters)] = row[list(letters)]
        return softmax(masked)

    counts = Counter(
        engine.generate(
            prompt, response_format={"type": "regex", "regex": "[a-c][b-d]"}, seed=seed, **ANY
        ).tokens
        for seed in range(600)
    )  # fmt: skip
    assert fit(counts, joint_law(law, 2)) > P_MIN


def test_forced_tokens_are_proposed_and_stand(chat_model: Path, chat_draft: Path) -> None:
    with lspec.load(target=chat_model, draft=chat_draft, gamma=4, n_threads=1) as engine:
        response_format = FORMATS["json_schema"][0]
        stream = engine.stream("he said", response_format=response_format, seed=1, **ANY)
        rounds = [chunk.round for chunk in stream if chunk.round]
    forced = [(r, i) for r in rounds for i, s in enumerate(r.proposed) if s is Source.GRAMMAR]
    assert len(forced) > 20
    assert all(i < r.accepted for r, i in forced if set(r.proposed[:i]) <= {Source.GRAMMAR})
    assert rounds[0].proposed[:9] == (Source.GRAMMAR,) * 9, '{"name": '


def test_any_text_needs_no_constraint(engine: lspec.Engine) -> None:
    free = engine.generate("he said", seed=1, max_tokens=20, reuse=False)
    text = engine.generate(
        "he said", seed=1, max_tokens=20, reuse=False, response_format={"type": "text"}
    )
    assert text.tokens == free.tokens


@pytest.mark.parametrize("padding", [0, 5])
def test_neither_padding_nor_control_tokens_are_allowed(models: Path, padding: int) -> None:
    path = tiny.write_chat_model(models / f"padded-{padding}.gguf", seed=4, padding=padding)
    with lspec.load(target=path, gamma=4, n_threads=1) as engine:
        done = engine.generate("x", response_format={"type": "regex", "regex": r"(?s:.){50}"})
        constraint = Grammars(engine.vocab).constraint({"type": "regex", "regex": r"(?s:.){50}"})
        assert constraint is not None
        assert max(allowed(constraint)) == tiny.CHAT_MERGED
    assert done.finish_reason == "stop"
    assert max(done.tokens) <= tiny.CHAT_MERGED


# -- one constraint --

ENDS = [tiny.CHAT_ENDOFTEXT, tiny.CHAT_IM_END]

Make = Callable[..., Constraint]


@pytest.fixture(scope="module")
def vocab(chat_model: Path) -> Iterator[Vocab]:
    model = LlamaModel([chat_model], LoadOptions(n_ctx=64, max_rows=2))
    yield model.vocab
    model.close()


@pytest.fixture
def make(vocab: Vocab) -> Make:
    grammars = Grammars(vocab)

    def make(kind: str = "regex", **fields: Any) -> Constraint:
        constraint = grammars.constraint({"type": kind, **fields})
        assert constraint is not None
        return constraint

    return make


def ids(text: str) -> list[int]:
    """Return one token for each byte."""
    return list(text.encode())


def allowed(constraint: Constraint, drafted: Sequence[int] = ()) -> list[int]:
    mask = constraint.allowed(drafted)
    assert mask is not None
    assert mask.dtype == np.int32
    assert all(a < b for a, b in pairwise(mask))
    return mask.tolist()


def test_ends_are_allowed_where_the_text_may_end(make: Make) -> None:
    constraint = make(regex="ab?")
    assert allowed(constraint) == ids("a")
    assert allowed(constraint, ids("a")) == [*ids("b"), *ENDS]
    assert allowed(constraint, ids("ab")) == ENDS


def test_text_that_may_be_empty_may_end_at_once(make: Make) -> None:
    assert allowed(make(regex="a*")) == [*ids("a"), *ENDS]
    assert allowed(make(regex="")) == ENDS


def test_second_ask_in_a_round_costs_nothing(make: Make) -> None:
    constraint = make(regex="[ab]*")
    first = constraint.allowed(ids("ab"))
    assert constraint.allowed(()) is constraint.allowed([])
    assert constraint.allowed(np.array(ids("ab"))) is first  # type: ignore[arg-type]
    constraint.accept(ids("a"))
    assert constraint.allowed(ids("b")) is not first


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_allowed_depends_on_the_text_alone(make: Make, name: str) -> None:
    fields = FORMATS[name][0]
    rng = np.random.default_rng(1)
    constraint, text = make(**{"kind": fields["type"]}, **_without_type(fields)), list[int]()
    while text[-1:] != [tiny.CHAT_IM_END]:
        path = list[int]()
        for _ in range(6):
            choices = constraint.allowed(path)
            if choices is None or not len(choices) or path[-1:] == [tiny.CHAT_IM_END]:
                break
            fresh = make(**{"kind": fields["type"]}, **_without_type(fields))
            fresh.accept(text)
            for i in range(len(path)):
                fresh.accept(path[i : i + 1])
            assert allowed(constraint, path) == allowed(fresh)
            assert constraint.forced(path) == fresh.forced(())
            path.append(_pick(rng, choices))
            if rng.random() < 0.2:
                constraint.allowed([*path, 0, 1])  # which is no text, and must not matter
        kept = path[: int(rng.integers(1, len(path) + 1))]
        constraint.accept(kept)
        text += kept


def _without_type(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != "type"}


def _pick(rng: np.random.Generator, choices: IdArray) -> int:
    """Return one of `choices`: often what brings JSON to an end."""
    closing = [c for c in choices if c in ids('"}]!') or c == tiny.CHAT_IM_END]
    return int(rng.choice(closing if closing and rng.random() < 0.5 else choices))


@pytest.mark.parametrize(
    "drafted", [ids("x"), ids("abx"), ids("abab"), [*ids("ab"), ENDS[0]], [ENDS[1]], [258]]
)
def test_drafted_tokens_outside_the_grammar_restrict_nothing_and_do_no_harm(
    make: Make, drafted: list[int]
) -> None:
    constraint = make(regex="ab(ac)?")
    assert constraint.allowed(drafted) is None
    assert constraint.forced(drafted) == ()
    assert constraint.allowed([*drafted, 7]) is None
    assert allowed(constraint, ids("ab")) == [*ids("a"), *ENDS]
    constraint.accept(ids("ab"))
    assert constraint.allowed(drafted) is None
    assert constraint.forced(ids("a")) == (*ids("c"),)
    constraint.accept(ids("ac"))
    assert allowed(constraint) == ENDS


@pytest.mark.parametrize("end", ENDS)
def test_an_end_token_can_be_accepted_last(make: Make, end: int) -> None:
    constraint = make(regex="ab")
    constraint.accept([])
    constraint.accept(ids("a"))
    constraint.accept([*ids("b"), end])
    assert allowed(constraint) == ENDS


def test_forced_tokens_are_allowed_one_after_the_other(make: Make, vocab: Vocab) -> None:
    constraint = make("json_schema", json_schema={"schema": SCHEMA})
    forced = constraint.forced(())
    assert b"".join(map(vocab.piece, forced)).startswith(b'{"name": ')
    for i, token in enumerate(forced):
        assert token in allowed(constraint, forced[:i])
    assert constraint.forced(ids('{"name": "x')) == ()
    assert constraint.forced(ids('{"name": "x", "ki')) == (*ids('nd": '),)
    assert constraint.forced(forced[:3]) == forced[3:]


def test_merged_token_is_forced_where_the_model_would_write_it(make: Make) -> None:
    assert make(regex="[ab]cheer").forced(ids("a")) == (*ids("c"), tiny.CHAT_MERGED, *ids("er"))


def test_end_is_proposed_behind_a_whole_text(make: Make) -> None:
    constraint = make(regex="ab?")
    assert constraint.forced(ids("a")) == ()
    assert constraint.forced(ids("ab")) == (tiny.CHAT_IM_END,)


def test_grammar_may_ask_for_a_control_token_by_name(make: Make) -> None:
    constraint = make("grammar", grammar='start: "a" <|im_start|> /[bc]/')
    assert constraint.forced(()) == (*ids("a"), tiny.CHAT_IM_START)
    assert allowed(constraint, ids("a")) == [tiny.CHAT_IM_START]
    assert allowed(constraint, [*ids("a"), tiny.CHAT_IM_START]) == ids("bc")


def test_schema_may_choose_its_own_white_space(make: Make) -> None:
    schema = {**SCHEMA, "x-guidance": {"item_separator": ",", "key_separator": ":"}}
    constraint = make("json_schema", json_schema={"schema": schema})
    assert constraint.allowed(ids('{"name":"x","kind":')) is not None
    assert constraint.allowed(ids('{"name": ')) is None


def test_bytes_of_an_spm_vocabulary_follow_a_grammar_too(spm_model: Path) -> None:
    short = {tiny.SPM_BYTES + byte: bias for byte, bias in SHORT.items()}
    with lspec.load(target=spm_model, gamma=4, n_threads=1) as engine:
        for response_format, is_valid in FORMATS.values():
            done = engine.generate(
                "x", response_format=response_format, seed=2, logit_bias=short, **ANY
            )
            assert is_valid(done.text), done.text


# -- errors --


WRONG_SHAPES: list[Any] = [
    {},
    [],
    "json_object",
    {"type": "xml"},
    {"type": ["text"]},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {}},
    {"type": "json_schema", "json_schema": {"schema": "{}"}},
    {"type": "json_schema", "json_schema": {"schema": True}},
    {"type": "json_schema", "schema": {"type": "object"}},
    {"type": "regex", "regex": 3},
    {"type": "regex", "grammar": "a"},
    {"type": "choice", "choices": []},
    {"type": "choice", "choices": "abc"},
    {"type": "choice", "choices": ["a", ""]},
    {"type": "choice", "choices": ["a", 1]},
    {"type": "grammar", "grammar": ['root ::= "a"']},
]


@pytest.mark.parametrize("response_format", WRONG_SHAPES, ids=str)
def test_wrong_shape_is_an_error_that_shows_the_right_one(
    vocab: Vocab, response_format: Any
) -> None:
    with pytest.raises(RequestError) as caught:
        Grammars(vocab).constraint(response_format)
    assert re.search(r"looks like \{|Types are text", f"{caught.value} {caught.value.hint}")


def schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": fields}}


def grammar(text: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": text}


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": (schema(type="strin"), "Invalid type: strin"),
    "impossible": (schema(type="integer", minimum=5, maximum=3), "Unsatisfiable"),
    "unsupported": (schema(**{"not": {"type": "string"}}), "not"),
    "far away": (schema(**{"$ref": "https://example.org/x"}), "example.org"),
    "pattern": (schema(type="string", pattern="(?=a)"), "look-around"),
    "no JSON": (schema(minimum=float("nan")), "no JSON"),
    "no JSON either": (schema(enum=[object()]), "no JSON"),
    "regex": ({"type": "regex", "regex": "a("}, "unclosed group"),
    "empty regex": ({"type": "regex", "regex": r"[^\s\S]"}, "no token can follow"),
    "half a character": ({"type": "regex", "regex": "\ud83d"}, "surrogate"),
    "half a choice": ({"type": "choice", "choices": ["a\ud83d"]}, "not a Unicode scalar value"),
    "half a schema": (schema(const="\ud83d"), "no JSON"),
    "gbnf": (grammar('root ::= "a'), "end of input"),
    "gbnf without a rule": (grammar("root ::= a"), "'a' not found"),
    "gbnf cut off": (grammar('root ::= "\\'), "broken"),
    "nothing": (grammar(""), "No 'root' rule"),
    "lark": (grammar("start: x"), 'unknown name: "x"'),
    "endless": (grammar('start: start "x"'), "no token can follow"),
    "one way": (grammar('start: a "x"\na[max_tokens=3]: /[a-c]+/'), "rollback"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_or_impossible_format_is_one_sentence_before_any_text(
    engine: lspec.Engine, name: str
) -> None:
    response_format, reason = BROKEN[name]
    with pytest.raises(RequestError, match=re.escape(reason)) as caught:
        engine.stream("he said", response_format=response_format)
    assert "\n" not in str(caught.value)
    assert engine.generate("he said", max_tokens=2).stats.rounds > 0


def test_grammar_that_leads_nowhere_is_an_error_where_it_does(engine: lspec.Engine) -> None:
    stream = engine.stream("he said", response_format=grammar('start: "ab" C\nC: /x/ & /y/'))
    with pytest.raises(DecodeError, match="no token can follow"):
        list(stream)
    assert engine.generate("he said", max_tokens=2).stats.rounds > 0


def test_model_without_a_vocabulary_has_no_grammar(law_target: Path) -> None:
    with (
        lspec.load(target=law_target, gamma=4, n_threads=1) as engine,
        pytest.raises(RequestError, match="end-of-generation"),
    ):
        engine.generate([1], response_format={"type": "json_object"})


def test_without_llguidance_the_hint_is_how_to_install_it(
    vocab: Vocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("llguidance", "llguidance.gbnf_to_lark"):
        monkeypatch.setitem(sys.modules, name, None)
    for response_format, _ in FORMATS.values():
        with pytest.raises(RequestError, match="llguidance") as caught:
            Grammars(vocab).constraint(response_format)
        assert "pip install 'lspec[grammar]'" in caught.value.hint
    assert Grammars(vocab).constraint({"type": "text"}) is None


def test_llguidance_is_loaded_only_for_a_grammar() -> None:
    code = "import lspec.engine, lspec.grammar, sys; print('llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_closed_engine_is_an_error_and_no_crash(chat_model: Path) -> None:
    response_format = FORMATS["json_schema"][0]
    engine = lspec.load(target=chat_model, gamma=4, n_threads=1)
    stream = engine.stream([65], response_format=response_format)
    next(stream)
    engine.close()
    with pytest.raises(RequestError, match="closed"):
        next(stream)
    with pytest.raises(RequestError, match="closed"):
        engine.stream([65], response_format=response_format)
    engine = lspec.load(target=chat_model, gamma=4, n_threads=1)
    engine.close()
    with pytest.raises(RequestError, match="closed"):
        engine.stream([65], response_format=response_format)


@pytest.mark.parametrize("ask", ["allowed", "forced", "accept"])
def test_constraint_of_a_closed_model_is_of_no_use(chat_model: Path, ask: str) -> None:
    model = LlamaModel([chat_model], LoadOptions(n_ctx=64, max_rows=2))
    constraint = Grammars(model.vocab).constraint({"type": "regex", "regex": "abc"})
    model.close()
    with pytest.raises(RequestError, match="closed"):
        getattr(constraint, ask)([])


# -- the command line --


def test_command_line_answers_by_a_schema_or_a_grammar(chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps({"enum": ["bird", 3, None]}))
    (tmp_path / "items.gbnf").write_text(GBNF)
    common = ["generate", "--target", str(chat_model), "--gamma", "4", "--threads", "1", "-p", "x"]
    done = run(*common, "--json-schema", str(tmp_path / "schema.json"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) in ("bird", 3, None)
    done = run(*common, "--grammar", str(tmp_path / "items.gbnf"))
    assert done.returncode == 0, done.stderr
    assert follows_items(done.stdout.rstrip("\n"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not JSON"),
        ('{"type": "strin"}', "Invalid type: strin"),
        ("[1]", "is no JSON schema"),
    ],
)
def test_command_line_refuses_a_broken_schema(
    chat_model: Path, tmp_path: Path, text: str, sentence: str
) -> None:
    path = tmp_path / "schema.json"
    path.write_text(text)
    model = ["--target", str(chat_model), "--gamma", "4"]
    done = run("generate", *model, "-p", "x", "--json-schema", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
