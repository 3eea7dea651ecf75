"""Do two vocabularies match, and what is said when they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lspec.compat import MAX_PADDING, Vocabulary, require_match
from lspec.errors import IncompatiblePairError

TEXTS = tuple(f"word{i}".encode() for i in range(100))
QWEN = Vocabulary(kind="BPE", size=128, bos=-1, eos=-1, texts=TEXTS)


def refusal(target: Vocabulary, draft: Vocabulary) -> str:
    with pytest.raises(IncompatiblePairError) as caught:
        require_match(target, draft)
    return str(caught.value)


def test_equal_vocabularies_match() -> None:
    require_match(QWEN, replace(QWEN))


def test_sizes_may_differ_by_padding() -> None:
    require_match(QWEN, replace(QWEN, size=QWEN.size + MAX_PADDING))
    require_match(replace(QWEN, size=152_064), replace(QWEN, size=151_936))


def test_sizes_that_differ_by_more_are_refused() -> None:
    message = refusal(QWEN, replace(QWEN, size=QWEN.size + MAX_PADDING + 1))
    assert "128" in message
    assert "257" in message


def test_first_differing_id_and_both_texts_are_named() -> None:
    other = (*TEXTS[:40], b"other", *TEXTS[41:60], b"later", *TEXTS[61:])
    message = refusal(QWEN, replace(QWEN, texts=other))
    assert "token 40 " in message
    assert "'word40'" in message
    assert "'other'" in message
    assert "later" not in message


def test_differing_id_is_named_rather_than_the_sizes() -> None:
    other = replace(QWEN, size=49_152, texts=(b"<|endoftext|>", *TEXTS[1:]))
    assert "token 0 " in refusal(QWEN, other)


def test_texts_that_are_no_utf8_are_shown() -> None:
    assert "'\ufffd'" in refusal(QWEN, replace(QWEN, texts=(b"\xff", *TEXTS[1:])))


def test_differing_kinds_are_refused() -> None:
    message = refusal(QWEN, replace(QWEN, kind="SPM"))
    assert "BPE" in message
    assert "SPM" in message


@pytest.mark.parametrize(("field", "name"), [("bos", "BOS"), ("eos", "EOS")])
def test_differing_bos_and_eos_are_refused(field: str, name: str) -> None:
    for ours, theirs in ((-1, 5), (5, -1), (5, 6)):
        message = refusal(replace(QWEN, **{field: ours}), replace(QWEN, **{field: theirs}))
        assert name in message
        for token in (ours, theirs):
            assert (" no" if token < 0 else f" {token}") in message


def test_tokens_that_one_side_has_behind_the_common_ones_are_padding_to_the_other() -> None:
    require_match(QWEN, replace(QWEN, texts=(*TEXTS, b"one more")))
