"""Loading models for trial: `python -m lspec.trial`, started by lspec.probe, may die of it.

It reads from stdin a JSON list of models, each a list of the paths of its files, and writes a line
"ready", then one line of JSON per model: null if all went well, else [sentence, hint].
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from lspec.errors import LspecError, ModelLoadError, RequestError, RollbackError
from lspec.llama import LlamaModel, LoadOptions, can_offload, chat_renderer
from lspec.round import MAX_GAMMA

_WINDOW = 512
_SPARE_BYTES = 4 << 30  # for cache and buffers of a small window, whatever the model
_SECONDS, _BYTES_PER_S = 20.0, 50e6  # of computing: for any model, and by its size
_TEXT = "The 1st café\n\t漢字 🙂 it's   <|im_end|></s>\0"
_CHAT = [{"role": "user", "content": _TEXT}]


def attempt(files: Sequence[Path]) -> None:
    """Do with a model all that lspec does before the first text. Raises LspecError.

    That is: load it, make a context, read the whole vocabulary, tokenize, render the chat
    template, and evaluate a few tokens.
    """
    # One thread: a few of them would wait for one another on a busy machine.
    options = LoadOptions(_WINDOW, MAX_GAMMA + 1, n_gpu_layers=0, n_threads=1)
    model = LlamaModel(files, options)
    try:
        vocab = model.vocab
        _ = vocab.vocabulary, vocab.ends, vocab.named, vocab.control_texts
        for token in range(vocab.n_tokens):
            vocab.piece(token)
        with suppress(RequestError):  # no vocabulary, a broken template: told when they are used
            for special in (False, True):
                vocab.tokenize(_TEXT, bos=True, special=special)
            if template := model.chat_template:
                chat_renderer(template, vocab)(list(_CHAT))
        if np.isnan(model.eval([1, 2], rows=2)).any():
            raise ModelLoadError(
                f"{files[0]} is damaged: its logits are not numbers", hint="Fetch it again."
            )
        with suppress(RollbackError):
            model.truncate(1)
        model.eval([3], rows=1)
    finally:
        model.close()


def limit(files: Iterable[Path]) -> None:
    """Let this process have little more memory and time than the files need, and dump no core.

    A monstrous allocation is then refused, where the system itself would begin to kill, and a loop
    without end has one.
    """
    try:
        import resource
    except ImportError:  # not on Windows
        return
    size = sum(path.stat().st_size for path in files)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the first one to go
    with suppress(OSError, ValueError):  # no such file; a limit that is lower already
        seconds = int(_SECONDS + size / _BYTES_PER_S)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        if not can_offload():  # a GPU's driver reserves addresses without measure
            n_bytes = pages * resource.getpagesize() + 2 * size + _SPARE_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))


def main() -> None:
    """Try the models of stdin in turn; the first one that does not go ends it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is heard inside llama.cpp as well
    models = [list(map(Path, paths)) for paths in json.load(sys.stdin)]
    limit(path for files in models for path in files)
    print("ready", flush=True)
    for files in models:
        try:
            attempt(files)
        except LspecError as error:
            print(json.dumps([str(error), error.hint]), flush=True)
            return
        print("null", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # nothing that the files have done to this process matters any more
