"""Token bytes to text: split characters and stop strings, against a plain reference."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest

from lspec.errors import RequestError
from lspec.text import TextStream


def streamed(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[str, list[str], int]:
    """Return the joined text, its parts and `tokens_kept`."""
    stream = TextStream(stop)
    parts = [stream.push(piece) for piece in pieces]
    parts.append(stream.finish())
    return "".join(parts), parts, stream.tokens_kept


def cut(text: str, stop: Sequence[str]) -> str:
    """The plain reference: end at the match that is complete first; of those, the longest."""
    for end in range(len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches:
            return text[: end - max(map(len, matches))]
    return text


def segmentations(data: bytes) -> Iterator[list[bytes]]:
    """Yield every way to cut `data` into pieces."""
    places = range(1, len(data))
    for n in range(len(data)):
        for chosen in combinations(places, n):
            yield [data[a:b] for a, b in pairwise((0, *chosen, len(data)))]


# -- UTF-8 --

MIXED = "aé漢🙂e\u0301\r\n\0z"


def test_text_is_whole_however_the_bytes_are_split() -> None:
    data = MIXED.encode()
    for pieces in segmentations(data[:13]):
        assert streamed(pieces)[0] == data[:13].decode()
    assert streamed([bytes([b]) for b in data])[0] == MIXED


def test_each_character_is_released_as_soon_as_it_is_whole() -> None:
    stream, known = TextStream(), b""
    for byte in MIXED.encode():
        known += bytes([byte])
        released = stream.push(bytes([byte]))
        whole = known.decode(errors="ignore")
        assert released == whole[len(known[:-1].decode(errors="ignore")) :]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\xffb", "a\ufffdb"),
        (b"\xc3", "\ufffd"),
        (b"\xf0\x9f\x99", "\ufffd"),
        (b"\xe6\xbcx", "\ufffdx"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),  # a surrogate is no character
        (b"\x80\x80", "\ufffd\ufffd"),
        (b"\xc0\xaf", "\ufffd\ufffd"),
        (b"", ""),
    ],
)
def test_broken_utf8_becomes_replacement_characters(data: bytes, text: str) -> None:
    for pieces in segmentations(data) if data else [[b""], []]:
        assert streamed(pieces)[0] == text == data.decode(errors="replace")


def test_random_bytes_decode_as_python_decodes_them() -> None:
    rng = random.Random(0)
    for _ in range(300):
        data = bytes(rng.choices([0x41, 0x80, 0xBF, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0x9F], k=12))
        pieces = [data[i : i + 1] for i in range(12)]
        assert streamed(pieces)[0] == data.decode(errors="replace")


# -- stop strings --

COUNTING = "one, two, three, four, five, six, seven, eight, nine, ten"
CASE_4 = ["five", "thr", "ee, f"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 100])
def test_text_is_cut_at_the_earliest_match_not_the_first_in_the_list(size: int) -> None:
    pieces = [COUNTING[i : i + size].encode() for i in range(0, len(COUNTING), size)]
    assert streamed(pieces, CASE_4)[0] == "one, two, "
    assert streamed([COUNTING.encode()], CASE_4)[0] == "one, two, "


def test_nothing_is_released_after_a_stop() -> None:
    stream = TextStream(["b"])
    assert stream.push(b"abc") == "a"
    assert stream.stopped
    assert stream.push(b"def") == stream.finish() == ""


def test_what_turns_out_to_be_no_stop_is_released() -> None:
    stream = TextStream(["abcd"])
    assert [stream.push(bytes([b])) for b in b"xabcabce"] == [
        "x",
        "",
        "",
        "",
        "abc",
        "",
        "",
        "abce",
    ]
    assert not stream.stopped


def test_text_held_back_is_released_at_the_end() -> None:
    stream = TextStream(["stop"])
    assert stream.push(b"a st") == "a "
    assert stream.finish() == "st"
    assert not stream.stopped


def test_stop_that_ends_with_the_last_bytes() -> None:
    assert streamed([b"go st", b"op"], ["stop"])[0] == "go "
    assert streamed([b"a\xf0\x9f"], ["\ufffd"])[0] == "a"  # complete only at the end


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("aaab", ["aab"], "a"),
        ("abababc", ["ababc"], "ab"),
        ("xabcx", ["abc", "bc", "c"], "x"),  # all are complete at once: the longest
        ("xabcdx", ["abcd", "c"], "xab"),  # complete first
        ("stop", ["stop"], ""),
        ("no", ["stop", "nox"], "no"),
        ("é漢🙂", ["漢"], "é"),
        ("a\nb", ["\n"], "a"),
        ("abc", ["abc", "abc"], ""),
    ],
)
def test_stop_strings_by_hand(text: str, stop: list[str], expected: str) -> None:
    assert cut(text, stop) == expected
    for pieces in segmentations(text.encode()):
        assert streamed(pieces, stop)[0] == expected


def test_every_segmentation_gives_the_text_of_the_plain_reference() -> None:
    rng = random.Random(1)
    for _ in range(150):
        text = "".join(rng.choices("ab🙂", weights=[4, 4, 1], k=7))
        stop = ["".join(rng.choices("ab🙂", weights=[4, 4, 1], k=rng.randint(1, 4))) for _ in "123"]
        expected = cut(text, stop)
        for pieces in rng.sample(list(segmentations(text.encode()[:10])), 40):
            assert streamed(pieces, stop)[0] == cut(
                text.encode()[:10].decode(errors="replace"), stop
            )
        assert streamed([bytes([b]) for b in text.encode()], stop)[0] == expected


def test_tokens_kept_are_those_that_begin_before_the_stop() -> None:
    rng = random.Random(2)
    for _ in range(500):
        words = ["".join(rng.choices("ab", k=rng.randint(0, 4))) for _ in range(6)]
        stop = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(2)]
        pushed, stream = [], TextStream(stop)
        for word in words:
            if stream.stopped:
                break
            stream.push(word.encode())
            pushed.append(word)
        stream.finish()
        kept = cut("".join(pushed), stop)
        starts = [len("".join(pushed[:i])) for i in range(len(pushed))]
        expected = sum(start < len(kept) for start in starts) if stream.stopped else len(pushed)
        assert stream.tokens_kept == expected


def test_tokens_kept_counts_tokens_without_text_and_parts_of_characters() -> None:
    assert streamed([b"a", b"", b"\xe6", b"\xbc", b"\xa2"])[2] == 5
    assert streamed([b"a", b"\xe6", b"\xbc", b"\xa2", b"!"], ["!"])[2] == 4
    assert streamed([b"!", b"a"], ["!"])[2] == 0


def test_no_more_is_held_back_than_a_stop_can_need() -> None:
    """So each token costs the same, however long the text and the run of near misses is."""
    stop = ["a" * 20 + "b", "aac"]
    stream, pushed, released = TextStream(stop), 0, 0
    for _ in range(5000):
        released += len(stream.push(b"aaa"))
        pushed += 3
        assert pushed - released <= 20
    assert pushed - released + len(stream.finish()) == 20 + 20


@pytest.mark.parametrize("stop", [[""], ["a", ""]])
def test_empty_stop_string_is_refused(stop: list[str]) -> None:
    with pytest.raises(RequestError, match="empty"):
        TextStream(stop)
