"""A running `lspec serve`, and what its metrics say."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai


@dataclass
class Server:
    """A server in a process of its own, at `url`, which ends with /v1."""

    process: subprocess.Popen[str]
    url: str
    said: str  # on stderr; all of it once it has ended

    def client(self, key: str = "any") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=60)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url, api_key="any", max_retries=0, timeout=60)

    def metric(self, name: str) -> float:
        """Return a metric without labels."""
        with urllib.request.urlopen(self.url.removesuffix("/v1") + "/metrics") as reply:
            found = re.search(rf"^lspec_{name} (\S+)$", reply.read().decode(), re.MULTILINE)
        assert found, name
        return float(found[1])

    def wait_until(self, name: str, value: float) -> None:
        """Ask again and again until a metric has a value."""
        for _ in range(20_000):
            if self.metric(name) == value:
                return
        raise AssertionError(f"{name} is {self.metric(name)}, not {value}")

    def end(self, signum: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(signum)
        _, rest = self.process.communicate(timeout=60)
        self.said += rest
        return self.process.returncode


@contextmanager
def serving(target: Path, draft: Path, *args: str) -> Iterator[Server]:
    """Start a server with `args` on a free port; end it if it still runs."""
    command = [sys.executable, "-m", "lspec", "serve", "--target", str(target)]
    command += ["--draft", str(draft), "--gamma", "4", "--port", "0", *args]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        try:
            for line in process.stderr:
                said += line
                if found := re.search(r"on (http\S+)", line):
                    server = Server(process, found[1], said)
                    break
            else:
                raise AssertionError(said)
            yield server
        finally:
            if process.poll() is None:
                process.kill()
