"""Prompts of a benchmark: the built-in set and files of the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lspec.errors import RequestError
from lspec.prompts import BUILT_IN, Prompt, read, select


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_built_in_set_has_all_categories() -> None:
    prompts = read(BUILT_IN)
    assert len(prompts) == 15
    assert {prompt.category for prompt in prompts} == {
        *("code", "chat", "math", "translation", "copy", "creative")
    }


def test_prompt_is_a_message_of_the_user_and_messages_are_taken_as_they_are(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = written(
        tmp_path,
        json.dumps({"id": "a", "category": "x", "prompt": "Hi"}),
        json.dumps({"id": "b", "messages": chat}),
    )
    hi = {"role": "user", "content": "Hi"}
    assert read(path) == [Prompt("a", "x", (hi,)), Prompt("b", "other", tuple(chat))]


def test_missing_ids_are_line_numbers_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "one"}', "", '{"prompt": "two\u2028lines"}', "")
    assert [prompt.id for prompt in read(path)] == ["line 1", "line 3"]


def test_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "Grüße"}\r\n', encoding="utf-8-sig")
    assert read(path)[0].messages[0]["content"] == "Grüße"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"id": "a"}', "has neither"),
        ('{"prompt": "a", "messages": []}', "has prompt and messages"),
        ('{"prompt": 7}', "'prompt' is not a text"),
        ('{"messages": "Hi"}', "not a list"),
        ('{"messages": []}', "not a list"),
        ('{"messages": [{"role": "user"}]}', "'role' and 'content'"),
        ('{"messages": ["Hi"]}', "'role' and 'content'"),
        ('{"prompt": "a", "id": 3}', "'id' and 'category'"),
        ('{"prompt": "a", "category": null}', "'id' and 'category'"),
        ('{"prompt": "a", "id": "first"}', "there already"),
    ],
)
def test_bad_line_is_named_with_its_file_and_number(tmp_path: Path, line: str, reason: str) -> None:
    path = written(tmp_path, '{"id": "first", "prompt": "ok"}', "", line)
    with pytest.raises(RequestError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert reason in str(caught.value)
    assert '{"prompt"' in caught.value.hint


def test_unreadable_and_empty_files_are_named(tmp_path: Path) -> None:
    missing, binary = tmp_path / "missing.jsonl", tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (missing, binary, tmp_path, written(tmp_path, "", " ")):
        with pytest.raises(RequestError, match=str(path)):
            read(path)


def test_selection_keeps_the_order_of_the_file() -> None:
    prompts = [Prompt(f"{c}-{i}", c, ()) for i in range(3) for c in ("a", "b", "c")]
    chosen = select(prompts, categories=["c", "a"], limit=2)
    assert [prompt.id for prompt in chosen] == ["a-0", "c-0", "a-1", "c-1"]
    assert select(prompts) == prompts


def test_unknown_category_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match="'verse'") as caught:
        select([Prompt("1", "code", ()), Prompt("2", "chat", ())], categories=["verse"])
    assert caught.value.hint == "There are: code, chat."
