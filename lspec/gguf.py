"""The header of a GGUF file: what a model is, read without loading it.

Layout (all little-endian): magic, version, number of tensors, number of metadata entries; the
entries; then name, shape, type and offset of each tensor. Nothing in a damaged file is trusted, but
only what no llama.cpp could load is refused: a newer one may know more than this file does.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from platform import machine
from typing import BinaryIO

from lspec.errors import ModelLoadError

Value = int | float | bool | str | list["Value"] | None

_NUMBERS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"},
    **{10: "<Q", 11: "<q", 12: "<d"},
}
_STRING, _ARRAY = 8, 9
_BLOCK = 1 << 16  # bytes read at once of a vocabulary
_KEPT_ITEMS = 1024  # of an array; of a vocabulary only the length is kept
_MOST_TEXT, _MOST_ITEMS = 1 << 26, 1 << 26
_MOST_ENTRIES, _MOST_TENSORS, _MOST_DIMENSIONS = 100_000, 1_000_000, 4
_MOST = 1 << 31  # of anything that is counted
_ALIGNMENT = 32

# Of ggml's types: weights in a block, and its bytes.
_BLOCKS = {
    **{0: (1, 4), 1: (1, 2), 30: (1, 2)},  # F32, F16, BF16
    **{24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8)},  # I8, I16, I32, I64, F64
    **{2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40)},  # Qn_0, Qn_1
    **{10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210)},  # Q2_K..Q6_K
    15: (256, 292),  # Q8_K
    **{16: (256, 66), 17: (256, 74), 22: (256, 82)},  # IQ2_XXS, IQ2_XS, IQ2_S
    **{18: (256, 98), 21: (256, 110)},  # IQ3_XXS, IQ3_S
    **{19: (256, 50), 29: (256, 56), 20: (32, 18), 23: (256, 136)},  # IQ1_S, IQ1_M, IQ4_NL, IQ4_XS
    **{34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18)},  # TQ, FP4, Q1_0
}


# Types that llama.cpp's CPU backend has kernels for that read several rows at once.
_REPACKED = {2, 12, 20, 39} | ({8, 13, 14} if machine() in ("arm64", "aarch64") else set())
_GOOD_PART = 1 / 3  # of a model's bytes


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: `type` is ggml's number, `offset` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int

    @property
    def elements(self) -> int:
        """Number of weights."""
        return prod(self.shape)

    @property
    def n_bytes(self) -> int | None:
        """Bytes in the file; None where the type is not known here."""
        if self.type not in _BLOCKS:
            return None
        weights, size = _BLOCKS[self.type]
        return self.elements // weights * size


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata and tensors of one file; long arrays in `metadata` are None, see `lengths`."""

    metadata: dict[str, Value]
    lengths: dict[str, int]  # of arrays
    tensors: tuple[Tensor, ...]
    size: int  # bytes up to the end of the tensor list

    @property
    def architecture(self) -> str:
        """The name of the architecture; "" where it is missing."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""

    def number(self, key: str, default: int = 0) -> int:
        """Return `architecture.key` as a whole number; of an array, its largest."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):
            value = max((item for item in value if isinstance(item, int)), default=default)
        return value if isinstance(value, int) else default

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor; where its type is not known here, those up to the next one."""
        offsets = sorted({tensor.offset for tensor in self.tensors})
        gaps = {start: end - start for start, end in pairwise(offsets)}
        return tuple(
            gaps.get(tensor.offset, 0) if tensor.n_bytes is None else tensor.n_bytes
            for tensor in self.tensors
        )

    @property
    def data_start(self) -> int:
        """Where in the file the data of the tensors begins."""
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        assert isinstance(alignment, int)  # parse_header has looked
        return -(-self.size // alignment) * alignment

    @property
    def data_end(self) -> int:
        """How long the file must be to hold every tensor whose type is known."""
        ends = (tensor.offset + (tensor.n_bytes or 0) for tensor in self.tensors)
        return max((self.data_start + end for end in ends), default=self.size)


def is_repackable(headers: Sequence[Header]) -> bool:
    """Return whether llama.cpp repacks a good part of a model's weights where a CPU computes them.

    `headers` are those of its file, or of its parts.
    """
    sizes = [
        (size, tensor.type in _REPACKED and len(tensor.shape) > 1)
        for header in headers
        for tensor, size in zip(header.tensors, header.sizes, strict=True)
    ]
    repacked = sum(size for size, is_repacked in sizes if is_repacked)
    return repacked > _GOOD_PART * sum(size for size, _ in sizes)


def read_header(path: Path) -> Header:
    """Read the header of a file. Raises ModelLoadError for what is no GGUF file, or damaged."""
    require_gguf(path)
    try:
        with path.open("rb") as file:
            header = parse_header(file)
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    if size < header.data_end:
        missing = header.data_end - size
        raise _damaged(path, f"of {header.data_end:,} bytes the last {missing:,} are missing")
    return header


def require_gguf(path: Path) -> None:
    """Raise ModelLoadError for what is not there, no file, or a file of another kind."""
    hint = "Give the path of a .gguf file; a pair is chosen by its name alone (`lspec ls`)."
    try:
        if path.exists() and not path.is_file():
            raise ModelLoadError(f"{path} is not a file", hint=hint)
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}", hint=hint) from None
    if magic != b"GGUF":
        raise ModelLoadError(f"{path} is not a GGUF file", hint=hint)


def parse_header(file: BinaryIO) -> Header:
    """Read a header from the start of `file`, which may end behind it. Raises ValueError."""
    if _read(file, 4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = _integer(file, "<I")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}")
    n_tensors = _count(file, _MOST_TENSORS, "tensors")
    n_entries = _count(file, _MOST_ENTRIES, "entries")
    metadata: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    for _ in range(n_entries):
        key, kind = _text(file), _integer(file, "<I")
        if kind == _ARRAY:
            metadata[key], lengths[key] = _array(file)
        else:
            metadata[key] = _value(file, kind)
    _require_sane(metadata)
    tensors = tuple(_tensor(file) for _ in range(n_tensors))
    return Header(metadata, lengths, tensors, file.tell())


def _require_sane(metadata: dict[str, Value]) -> None:
    """Raise ValueError for numbers that no model has; llama.cpp computes with some unchecked."""
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"its alignment is {alignment}")
    prefix = f"{metadata.get('general.architecture')}."
    for key, value in metadata.items():
        if key.startswith(prefix) and key.endswith(("_count", "_count_kv", "_length")):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, int) and not 0 <= item < _MOST:
                    raise ValueError(f"its {key} is {item:,}")


def _damaged(path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"{path} is damaged: {reason}",
        hint="Fetch it again: `lspec pull` checks and replaces the files of a pair.",
    )


def _read(file: BinaryIO, n: int) -> bytes:
    data = file.read(n)
    if len(data) < n:
        raise ValueError("it ends in the middle of its header")
    return data


def _skip(file: BinaryIO, n: int) -> None:
    """Go on behind `n` bytes, which must be there."""
    if n:
        file.seek(n - 1, os.SEEK_CUR)
        _read(file, 1)


def _skip_texts(file: BinaryIO, n: int) -> None:
    """Go on behind `n` texts; in blocks, since a vocabulary has hundreds of thousands."""
    block, at = b"", 0
    for _ in range(n):
        if at + 8 > len(block):
            file.seek(at - len(block), os.SEEK_CUR)
            block, at = file.read(_BLOCK), 0
            if len(block) < 8:
                raise ValueError("it ends in the middle of its header")
        length = int.from_bytes(block[at : at + 8], "little")
        if length > _MOST_TEXT:
            raise ValueError(f"its header speaks of {length:,} bytes in a text")
        at += 8 + length
    if at > len(block):
        _skip(file, at - len(block))
    else:
        file.seek(at - len(block), os.SEEK_CUR)


def _integer(file: BinaryIO, form: str) -> int:
    value: int = struct.unpack(form, _read(file, struct.calcsize(form)))[0]
    return value


def _count(file: BinaryIO, most: int, what: str) -> int:
    n = _integer(file, "<Q")
    if n > most:
        raise ValueError(f"its header speaks of {n:,} {what}")
    return n


def _text(file: BinaryIO) -> str:
    n = _count(file, _MOST_TEXT, "bytes in a text")
    return _read(file, n).decode("utf-8", errors="replace")


def _value(file: BinaryIO, kind: int) -> Value:
    if kind == _STRING:
        return _text(file)
    if kind not in _NUMBERS:
        raise ValueError(f"its header holds a value of the unknown type {kind}")
    form = _NUMBERS[kind]
    value: Value = struct.unpack(form, _read(file, struct.calcsize(form)))[0]
    return value


def _array(file: BinaryIO) -> tuple[Value, int]:
    """Return an array of numbers if it is short, else None; and its length."""
    kind, n = _integer(file, "<I"), _count(file, _MOST_ITEMS, "items in an array")
    if kind == _STRING:
        _skip_texts(file, n)
        return None, n
    if kind not in _NUMBERS:
        raise ValueError(f"its header holds an array of the unknown type {kind}")
    form = _NUMBERS[kind]
    size = n * struct.calcsize(form)
    if n > _KEPT_ITEMS:
        _skip(file, size)
        return None, n
    data = _read(file, size)
    return [item for (item,) in struct.iter_unpack(form, data)], n


def _tensor(file: BinaryIO) -> Tensor:
    name, n_dimensions = _text(file), _integer(file, "<I")
    if n_dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor has {n_dimensions} dimensions")
    shape = tuple(_integer(file, "<Q") for _ in range(n_dimensions))
    return Tensor(name, shape, _integer(file, "<I"), _integer(file, "<Q"))
