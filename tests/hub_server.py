"""A loopback server that speaks enough of the hub's protocol for the real client."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


@dataclass
class Served:
    """A file of the hub: what it says about it and what it then sends."""

    data: bytes
    sent: bytes
    commit: str = COMMIT
    cuts: list[int] = field(default_factory=list)
    ranges: bool = True
    status: int = 200
    error_code: str = ""
    is_hub: bool = True

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass
class Hub:
    """The files by (repository, name), and what was asked: (method, path, headers)."""

    endpoint: str
    files: dict[tuple[str, str], Served] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def add(self, repo: str, name: str, data: bytes, **more: object) -> Served:
        self.files[repo, name] = served = Served(data, data, **more)  # type: ignore[arg-type]
        return served

    def ranges(self) -> list[str | None]:
        """The Range of each download, in order; those of headers alone do not count."""
        return [found for found in self._all_ranges() if not is_part(found)]

    def parts(self) -> list[str]:
        """The Range of each request for a part of a file, up to some byte."""
        return [found for found in self._all_ranges() if found and is_part(found)]

    def _all_ranges(self) -> list[str | None]:
        return [h.get("range") for method, path, h in self.asked if path.startswith("/storage/")]


def is_part(wanted: str | None) -> bool:
    """Return whether a Range has an end."""
    return wanted is not None and wanted[-1].isdigit()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.hub.asked.append((self.command, path, headers))
        if path.startswith("/api/models/"):
            repo = path.removeprefix("/api/models/")
            files = [{"rfilename": name} for owner, name in self.hub.files if owner == repo]
            model = {"id": repo, "tags": ["license:mit"], "siblings": files}
            self._send(200, json.dumps(model).encode(), {})
        elif path.startswith("/storage/"):
            owner, repo, name = path.removeprefix("/storage/").split("/", 2)
            self._send_content(self.hub.files[f"{owner}/{repo}", name])
        else:
            self._resolve(path)

    def _resolve(self, path: str) -> None:
        owner, repo, _, revision, name = path[1:].split("/", 4)
        key = f"{owner}/{repo}"
        file = self.hub.files.get((key, name))
        if file is None:
            known = any(repo == key for repo, _ in self.hub.files)
            self._send(404, b"", {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"})
        elif file.status != 200:
            self._send(file.status, b"", {"X-Error-Code": file.error_code})
        elif revision not in ("main", file.commit):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif not file.is_hub:
            self._send(200, b"<html>Please log in</html>", {})
        else:
            # Like the hub: the content lies on another host, which must not get the token.
            elsewhere = self.hub.endpoint.replace("127.0.0.1", "localhost")
            headers = {
                "X-Repo-Commit": file.commit,
                "X-Linked-Etag": f'"{file.sha256}"',
                "X-Linked-Size": str(len(file.data)),
                "Location": f"{elsewhere}/storage/{key}/{name}",
            }
            self._send(302, b"", headers)

    def _send_content(self, file: Served) -> None:
        wanted = self.headers.get("Range", "") if file.ranges else ""
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, total = int(first or 0), len(file.sent)
        end = min(int(last) + 1, total) if last else total
        body = file.sent[start:end]
        headers = {"Content-Range": f"bytes {start}-{end - 1}/{total}"} if wanted else {}
        if file.cuts and not last:
            self.close_connection = True
            self._send(206 if wanted else 200, body, headers, file.cuts.pop(0))
        else:
            self._send(206 if wanted else 200, body, headers)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], upto: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:upto])


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve an empty hub on a free port of the loopback interface."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.hub = hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
