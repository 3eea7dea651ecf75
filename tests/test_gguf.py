from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny

from lspec import gguf as ours
from lspec.errors import ModelLoadError
from lspec.gguf import Header, parse_header, read_header

ROOT = Path(__file__).parents[1]
MODELS = ["chat_model", "spm_model", "law_target", "mamba_model", "lfm2_model"]


@pytest.mark.parametrize("name", MODELS)
def test_header_is_what_the_reference_reader_finds(
    name: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(name)
    header, reference = read_header(path), gguf.GGUFReader(path)
    expected = {key: f for key, f in reference.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata.keys() == expected.keys()
    for key, field in expected.items():
        if header.metadata[key] is not None:
            assert header.metadata[key] == field.contents(), key
        assert header.lengths.get(key) == (
            len(field.data) if field.types[0] == gguf.GGUFValueType.ARRAY else None
        )
    for tensor, wanted in zip(header.tensors, reference.tensors, strict=True):
        assert (tensor.name, tensor.shape) == (wanted.name, tuple(wanted.shape.tolist()))
        assert (tensor.elements, tensor.n_bytes) == (wanted.n_elements, wanted.n_bytes)
        assert header.data_start + tensor.offset == wanted.data_offset
    assert header.data_end == path.stat().st_size


def test_numbers_are_those_of_the_architecture(chat_model: Path, lfm2_model: Path) -> None:
    header = read_header(chat_model)
    assert (header.architecture, header.number("block_count")) == ("llama", tiny.BLOCKS)
    assert header.lengths["tokenizer.ggml.tokens"] == tiny.CHAT_SIZE
    assert (header.number("missing"), header.number("missing", 7)) == (0, 7)
    assert read_header(lfm2_model).number("attention.head_count_kv") == tiny.HEADS  # [0, HEADS]


def test_bytes_of_every_type_are_those_of_the_reference() -> None:
    for kind, (weights, size) in gguf.GGML_QUANT_SIZES.items():
        tensor = ours.Tensor("t", (weights * 3, 5), int(kind), 0)
        assert tensor.n_bytes == 15 * size, kind
    assert ours.Tensor("t", (32,), 9999, 0).n_bytes is None


def test_sizes_of_unknown_types_go_up_to_the_next_tensor(chat_model: Path) -> None:
    header = read_header(chat_model)
    assert header.sizes == tuple(tensor.n_bytes for tensor in header.tensors)
    unknown = tuple(replace(tensor, type=9999) for tensor in header.tensors)
    sizes = replace(header, tensors=unknown).sizes
    # The tensors are as long as their alignment wants; behind the last one nothing is known.
    assert sizes == (*header.sizes[:-1], 0)


def test_vocabulary_longer_than_a_block_is_skipped(tmp_path: Path) -> None:
    texts = ["x" * n for n in (0, 1, 70_000, 3, 200_000)] + [f"token {i}" for i in range(20_000)]
    writer = gguf.GGUFWriter(tmp_path / "long.gguf", "llama")
    writer.add_array("texts", texts)
    writer.add_uint32("after", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(tmp_path / "long.gguf")
    assert header.lengths == {"texts": len(texts)}
    assert header.metadata["after"] == 7


def test_parts_of_a_split_model_have_headers_of_their_own(tmp_path: Path) -> None:
    headers = [read_header(path) for path in tiny.write_split_chat_model(tmp_path)]
    assert len(headers) > 1
    assert headers[0].metadata["split.count"] == len(headers)
    names = [tensor.name for header in headers for tensor in header.tensors]
    assert len(names) == len({*names}) > len(headers)


def test_header_is_read_from_the_beginning_of_a_file_alone(chat_model: Path) -> None:
    whole = read_header(chat_model)
    assert parse_header(io.BytesIO(chat_model.read_bytes()[: whole.size])) == whole


def test_every_cut_through_the_header_is_an_error(law_target: Path) -> None:
    data = law_target.read_bytes()
    for length in range(4, read_header(law_target).size):
        with pytest.raises(ValueError, match="ends in the middle"):
            parse_header(io.BytesIO(data[:length]))


def test_missing_bytes_at_the_end_are_counted(chat_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    data = chat_model.read_bytes()
    path.write_bytes(data[:-1000])
    with pytest.raises(
        ModelLoadError, match=rf"short\.gguf is damaged: of {len(data):,} bytes the last 1,000 are"
    ) as caught:
        read_header(path)
    assert "lspec pull" in caught.value.hint


BROKEN = {
    "empty": (tiny.write_empty, "is not a GGUF file"),
    "web page": (tiny.write_web_page, "is not a GGUF file"),
    "truncated": (tiny.write_truncated, "bytes the last .* are missing"),
    "missing": (lambda path: path, "cannot read .*: No such file"),
    "folder": (lambda path: path.mkdir(), "is not a file"),
    "pipe": (os.mkfifo, "is not a file"),
    "magic alone": (lambda path: path.write_bytes(b"GGUF"), "ends in the middle"),
    "other end first": (
        lambda path: path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0)),
        "its version is 50331648",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_file_is_an_error_that_names_it(kind: str, tmp_path: Path) -> None:
    write, complaint = BROKEN[kind]
    path = tmp_path / "broken.gguf"
    write(path)
    with pytest.raises(ModelLoadError, match=complaint) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def header(*entries: bytes, tensors: tuple[bytes, ...] = ()) -> Header:
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
    return parse_header(io.BytesIO(b"".join((start, *entries, *tensors))))


HUGE = struct.pack("<Q", 1 << 60)


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ([struct.pack("<Q", 1 << 63)], "9,223,372,036,854,775,808 bytes in a text"),
        ([entry(b"k", 8, HUGE)], "bytes in a text"),
        ([entry(b"k", 9, struct.pack("<I", 8) + HUGE)], "items in an array"),
        ([entry(b"k", 9, struct.pack("<IQ", 4, 1 << 26))], "ends in the middle"),
        ([entry(b"k", 9, struct.pack("<IQ", 8, 1) + HUGE)], "bytes in a text"),
        ([entry(b"k", 9, struct.pack("<IQ", 9, 1))], "an array of the unknown type 9"),
        ([entry(b"k", 13, b"")], "a value of the unknown type 13"),
        ([entry(b"general.alignment", 4, struct.pack("<I", 0))], "its alignment is 0"),
        ([entry(b"general.alignment", 4, struct.pack("<I", 48))], "its alignment is 48"),
        ([entry(b"general.alignment", 6, struct.pack("<f", 32))], "its alignment is 32.0"),
    ],
)
def test_monstrous_and_unknown_values_are_errors(entries: list[bytes], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        header(*entries)


@pytest.mark.parametrize(("tensors", "entries"), [(1 << 62, 0), (0, 1 << 62)])
def test_monstrous_counts_are_errors(tensors: int, entries: int) -> None:
    with pytest.raises(ValueError, match="its header speaks of"):
        parse_header(io.BytesIO(b"GGUF" + struct.pack("<IQQ", 3, tensors, entries)))


@pytest.mark.parametrize("value", [1 << 31, (1 << 32) - 8])
@pytest.mark.parametrize("key", ["a.block_count", "a.rope.dimension_count", "a.b.key_length"])
def test_count_that_no_model_has_is_an_error(key: str, value: int) -> None:
    name = entry(b"general.architecture", 8, struct.pack("<Q", 1) + b"a")
    with pytest.raises(ValueError, match=f"its {key} is {value:,}"):
        header(name, entry(key.encode(), 4, struct.pack("<I", value)))
    assert header(name, entry(b"a.seed", 4, struct.pack("<I", value)))
    array = struct.pack("<IQii", 5, 2, 4, -8)
    with pytest.raises(ValueError, match=r"its a\.head_count_kv is -8"):
        header(name, entry(b"a.head_count_kv", 9, array))


def test_tensor_of_five_dimensions_is_an_error() -> None:
    with pytest.raises(ValueError, match="5 dimensions"):
        header(tensors=(struct.pack("<Q", 1) + b"t" + struct.pack("<I5QIQ", 5, *[1] * 5, 0, 0),))


def test_alignment_decides_where_the_data_begins() -> None:
    aligned = header(entry(b"general.alignment", 4, struct.pack("<I", 4096)))
    assert aligned.data_start == 4096
    assert header().data_start == 32


def test_long_arrays_are_counted_and_short_ones_kept() -> None:
    def array(n: int) -> bytes:
        return entry(b"k", 9, struct.pack("<IQ", 5, n) + np.arange(n, dtype="<i4").tobytes())

    assert header(array(3)).metadata["k"] == [0, 1, 2]
    long = header(array(5000))
    assert (long.metadata["k"], long.lengths["k"]) == (None, 5000)


def test_damaged_files_end_in_a_load_or_a_clear_error(tmp_path: Path) -> None:
    """2,000 of what scripts/fuzz_gguf.py tries, three of them through lspec.load itself."""
    command = [sys.executable, "scripts/fuzz_gguf.py", "--count", "2000", "--real", "3"]
    done = subprocess.run(
        [*command, "--seed", "1", "--keep", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0  FATAL" in done.stdout
    assert "died of the trial" in done.stdout
