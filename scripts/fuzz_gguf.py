#!/usr/bin/env python
"""Damage tiny GGUF files at random and see how loading each of them ends.

    scripts/fuzz_gguf.py [--count 100000] [--seed 1] [--keep FOLDER] [--real 10]

Each file goes the way of lspec.load in a forked process: its header is read, then it is loaded for
trial, and only if that went well it is loaded in earnest and writes a few tokens. Here the trial is
in the same process, so that a file costs milliseconds; then `--real` of the files that died of the
trial, one for each cause, go through lspec.load itself in a process of their own.

It fails, and keeps the file, where anything dies or fails with something else than an LspecError
outside the trial.
"""

from __future__ import annotations

import mmap
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from unittest import mock

import click

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tiny

import lspec
from lspec import opening, probe, trial
from lspec.gguf import parse_header, read_header

# What a process is doing with a file, then how that ended.
UNTOUCHED, HEADER, TRIAL, EARNEST, REFUSED, NOT_LOADED, LOADED, CRASHED, FATAL = range(9)
WORDS = {
    REFUSED: "refused by their header",
    NOT_LOADED: "not loaded, for a stated reason",
    LOADED: "loaded",
    CRASHED: "died of the trial",
    FATAL: "FATAL",
}
PER_PROCESS = 250  # files, after which a new process is forked
SECONDS = 3.0  # of computing for one file, which takes about 0.005; more is an endless loop
BYTES = 4 << 30  # of memory
NUMBERS = [0, 1, 2, 3, 4, 7, 8, 10, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 257, 512, 1024]
NUMBERS += [2**n + d for n in (15, 16, 20, 24, 31, 32, 40, 48, 62, 63, 64) for d in (-1, 0, 1)]
NUMBERS += [0x7F800000, 0xFF800000, 0x7FC00000]  # infinities and NaN as floats
TRY = """
import sys, lspec
try:
    lspec.load(target=sys.argv[1], drafter="none", n_ctx=128).close()
except lspec.ModelLoadError as error:
    print(error)
"""

MEMORY = Path("/dev/shm")  # files there never reach a disk
WORD = re.compile(rb"[\x21-\x7e]{2,}")

Random = random.Random


class Original:
    """A sound file, and where its numbers are: (offset, width) of lengths and of values."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        header = parse_header(BytesIO(data))
        self.header_size = header.size
        self.lengths = [(4, 4), (8, 8), (16, 8)]  # version, number of tensors and of entries
        self.values: list[tuple[int, int]] = []
        for key, value in header.metadata.items():
            at = data.index(key.encode()) + len(key)  # of the type
            self.lengths += [(at - len(key) - 8, 8), (at, 4), (at + 4, 8), (at + 8, 8)]
            if isinstance(value, int | float):
                self.values += [(at + 4, 1 if isinstance(value, bool) else 4)] * 4
            else:
                self.values += [(at + 12 + n, 4) for n in (0, 4, 8, 12, 100)]
        for tensor in header.tensors:
            at = data.index(tensor.name.encode()) + len(tensor.name)  # of the number of dimensions
            n = len(tensor.shape)
            self.lengths.append((at, 4))
            self.values += [(at + 4 + 8 * i, 8) for i in range(n)]
            self.values += [(at + 4 + 8 * n, 4), (at + 8 + 8 * n, 8)]  # type, offset

    def damaged(self, rng: Random) -> bytes:
        """Return the file with one to three damages."""
        data = bytearray(self.data)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            rng.choice(DAMAGES)(self, data, rng)
        return bytes(data)

    def place(self, data: bytearray, rng: Random) -> int:
        """Return an offset, most often in the header."""
        end = len(data) if rng.random() < 0.1 else min(self.header_size, len(data))
        return rng.randrange(max(end, 1))


def flip_bits(original: Original, data: bytearray, rng: Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        if data:
            data[original.place(data, rng)] ^= 1 << rng.randrange(8)


def set_byte(original: Original, data: bytearray, rng: Random) -> None:
    if data:
        data[original.place(data, rng)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def set_value(original: Original, data: bytearray, rng: Random) -> None:
    _set_number(rng.choice(original.values), data, rng)


def set_length(original: Original, data: bytearray, rng: Random) -> None:
    _set_number(rng.choice(original.lengths), data, rng)


def swap_values(original: Original, data: bytearray, rng: Random) -> None:
    (to, width), (source, _) = rng.choice(original.values), rng.choice(original.values)
    data[to : to + width] = data[source : source + width]


def rename(original: Original, data: bytearray, rng: Random) -> None:
    """Replace a key, the name of a tensor, a token or a word of the template by a like one."""
    words = list(WORD.finditer(original.data, 0, original.header_size))
    old, new = rng.choice(words), rng.choice(words)
    fits = [word[0] for word in words if len(word[0]) == len(old[0])]
    data[old.start() : old.end()] = rng.choice(fits) if rng.random() < 0.8 else new[0]


def cut_off(original: Original, data: bytearray, rng: Random) -> None:
    del data[original.place(data, rng) if rng.random() < 0.5 else rng.randrange(len(data) + 1) :]


def remove_region(original: Original, data: bytearray, rng: Random) -> None:
    at = original.place(data, rng)
    del data[at : at + rng.choice((1, 4, 8, 32, rng.randrange(1, 2000)))]


def repeat_region(original: Original, data: bytearray, rng: Random) -> None:
    at = original.place(data, rng)
    data[at:at] = data[at : at + rng.choice((1, 4, 8, 32, rng.randrange(1, 2000)))]


def copy_region(original: Original, data: bytearray, rng: Random) -> None:
    to, source, n = original.place(data, rng), original.place(data, rng), rng.randrange(1, 40)
    data[to : to + n] = data[source : source + n]


def insert_noise(original: Original, data: bytearray, rng: Random) -> None:
    at = original.place(data, rng)
    data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 50)))


Damage = Callable[[Original, bytearray, Random], None]
DAMAGES: list[Damage] = [
    *[set_value] * 12,
    *[flip_bits, set_byte, copy_region, swap_values, rename] * 3,
    *[set_length, cut_off, remove_region, repeat_region, insert_noise],
]


def _set_number(place: tuple[int, int], data: bytearray, rng: Random) -> None:
    at, width = place
    old = int.from_bytes(data[at : at + width], "little")
    new = rng.choice((rng.choice(NUMBERS), old + 1, old - 1, old * 2, old // 2, -old))
    data[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")


class Run:
    """The files 0 to `count` of a seed, and how each ended, noted where all processes see it."""

    def __init__(self, originals: list[Original], count: int, seed: int, folder: Path) -> None:
        self.originals, self.seed, self.folder = originals, seed, folder
        self.ends = mmap.mmap(-1, count)
        self.causes: dict[int, str] = {}  # of death
        numbers = range(count)
        self.waiting = deque(numbers[i : i + PER_PROCESS] for i in numbers[::PER_PROCESS])

    def file(self, number: int) -> bytes:
        """Return the damaged file with this number."""
        rng = Random(f"{self.seed} {number}")
        return rng.choice(self.originals).damaged(rng)

    def go(self, processes: int) -> None:
        """Try all files. Where one kills its process, another process goes on behind it."""
        running: dict[int, range] = {}
        while self.waiting or running:
            while self.waiting and len(running) < processes:
                numbers = self.waiting.popleft()
                running[self.fork(numbers)] = numbers
            pid, status = os.wait()
            numbers = running.pop(pid)
            if status:
                self.note_death(numbers, pid, os.waitstatus_to_exitcode(status))

    def note_death(self, numbers: range, pid: int, status: int) -> None:
        """Find the file that a process died of, and let another one do the rest."""
        number = next(n for n in numbers if self.ends[n] in (HEADER, TRIAL, EARNEST))
        log = (self.folder / f"{pid}.log").read_text(errors="replace")
        self.causes[number] = probe.reason(status, log)
        self.ends[number] = CRASHED if self.ends[number] == TRIAL else FATAL
        self.waiting.append(range(number + 1, numbers.stop))

    def fork(self, numbers: range) -> int:
        """Return the id of a new process that tries these files."""
        pid = os.fork()
        if pid == 0:
            with (self.folder / f"{os.getpid()}.log").open("w") as log:
                os.dup2(log.fileno(), 2)
            try:
                self.work(numbers)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        return pid

    def work(self, numbers: range) -> None:
        """Try these files, in the process that may die of them."""
        path = self.folder / f"{os.getpid()}.gguf"
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        for number in numbers:
            path.write_bytes(self.file(number))
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            self.ends[number] = self.end_of(path, number)
        path.unlink(missing_ok=True)

    def end_of(self, path: Path, number: int) -> int:
        """Do with a file what lspec.load does, noting before each step what it is."""
        try:
            self.ends[number] = HEADER
            read_header(path)
            self.ends[number] = TRIAL
            trial.attempt([path])
            self.ends[number] = EARNEST
            load_in_earnest(path)
        except lspec.LspecError:
            return REFUSED if self.ends[number] == HEADER else NOT_LOADED
        return LOADED


def load_in_earnest(path: Path) -> None:
    """Load a file that passed the trial as lspec.load does, and write a few tokens."""
    with (
        mock.patch.object(opening, "require_loadable"),
        lspec.load(target=path, n_ctx=128, n_threads=1, gamma=2, drafter="ngram") as engine,
    ):
        with suppress(lspec.LspecError):
            engine.generate([1, 2, 1], max_tokens=4, seed=1)
        with suppress(lspec.LspecError):
            engine.chat([{"role": "user", "content": "ab"}], max_tokens=4, temperature=0.0)


def survives(path: Path, folder: Path) -> bool:
    """Return whether lspec.load itself, with its trial, refuses the file and lives on."""
    done = subprocess.run(
        [sys.executable, "-c", TRY, str(path)],
        env=os.environ | {"XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode == 0 and "ends in a crash" in done.stdout and not done.stderr


def write_originals(folder: Path) -> list[Original]:
    """Write one sound file of each kind."""
    files = [
        tiny.write_chat_model(folder / "chat.gguf"),
        tiny.write_chat_model(folder / "padded.gguf", padding=8),
        tiny.write_spm_model(folder / "spm.gguf", add_bos=True),
        tiny.write_law_model(folder / "law.gguf", seed=1),
        tiny.write_mamba(folder / "mamba.gguf"),
        tiny.write_lfm2(folder / "lfm2.gguf"),
    ]
    return [Original(path.read_bytes()) for path in files]


@click.command()
@click.option("--count", default=100_000, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--real", default=10, show_default=True, help="Through lspec.load itself.")
@click.option("--keep", type=click.Path(path_type=Path), default=Path("fuzz"), show_default=True)
def main(count: int, seed: int, real: int, keep: Path) -> None:
    """Print how the files ended; exit with 1 if one was fatal."""
    os.environ |= probe.ENVIRONMENT
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        folder = Path(name)
        run = Run(write_originals(folder), count, seed, folder)
        run.go(os.cpu_count() or 1)
        ends = Counter(run.ends[:])
        for end, word in WORDS.items():
            click.echo(f"{ends[end]:8}  {word}")
        click.echo("Causes of death:")
        for cause, times in Counter(run.causes.values()).most_common():
            click.echo(f"{times:8}  {cause}")
        fatal = {n: run.causes[n] for n in run.causes if run.ends[n] == FATAL}
        crashed = {run.causes[n]: n for n in run.causes if run.ends[n] == CRASHED}
        for cause, number in list(crashed.items())[:real]:
            path = folder / "crash.gguf"
            path.write_bytes(run.file(number))
            if not survives(path, folder):
                fatal[number] = f"lspec.load did not survive: {cause}"
        for number, cause in fatal.items():
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{seed}-{number}.gguf").write_bytes(run.file(number))
            click.echo(f"FATAL: {keep}/{seed}-{number}.gguf: {cause}")
    sys.exit(bool(fatal))


if __name__ == "__main__":
    main()
