"""Clients that go away, a full queue, keys, and signals."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import tiny
from serving import Server, serving

WINDOW = "30000"  # far more than a tiny model writes before a test is done
LONG: Any = {"model": "long", "prompt": "Once", "temperature": 0}


@pytest.fixture(scope="module")
def pair(models: Path) -> tuple[Path, Path]:
    """A pair that goes on to the end of a long window."""
    return (
        tiny.write_chat_model(models / "long.gguf", seed=5, n_ctx=32768, end_bias=-20),
        tiny.write_chat_model(
            models / "long-draft.gguf", seed=5, blur=0.1, n_ctx=32768, end_bias=-20
        ),
    )


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path]) -> Iterator[Server]:
    with serving(*pair, "--ctx", WINDOW, "--queue", "1") as server:
        yield server
        assert server.end() == 0
    assert "Traceback" not in server.said


def test_a_client_that_goes_away_in_mid_stream_ends_its_answer(server: Server) -> None:
    with server.client() as client:
        with client.completions.create(**LONG, stream=True) as stream:
            next(iter(stream))
        reply = client.completions.create(**LONG, max_tokens=3)
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 3
    assert server.metric("generated_tokens_total") < int(WINDOW) / 2
    assert server.metric("running_requests") == server.metric("queue_requests") == 0


def test_a_client_that_goes_away_without_a_stream_ends_its_answer_too(server: Server) -> None:
    with socket.create_connection(address(server)) as connection:
        connection.sendall(request(b'{"prompt": "Once", "temperature": 0}'))
        server.wait_until("running_requests", 1)
    server.wait_until("running_requests", 0)
    assert server.metric("generated_tokens_total") < int(WINDOW)


def test_a_full_queue_refuses_and_a_waiting_client_frees_its_place(server: Server) -> None:
    with server.client() as client, client.completions.create(**LONG, stream=True) as stream:
        next(iter(stream))
        with socket.create_connection(address(server)) as waiting:
            waiting.sendall(request(b'{"prompt": "Once"}'))
            server.wait_until("queue_requests", 1)
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(**LONG, stream=True)
            assert (caught.value.status_code, caught.value.code) == (503, "queue_full")
            assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        server.wait_until("queue_requests", 0)
        assert server.metric("running_requests") == 1
        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(client.completions.create, **LONG, max_tokens=2)
            server.wait_until("queue_requests", 1)
            stream.close()
            assert last.result(60).choices[0].finish_reason == "length"


def test_other_requests_are_answered_while_a_text_is_written(server: Server) -> None:
    with server.client() as client, client.completions.create(**LONG, stream=True) as stream:
        next(iter(stream))
        assert [model.id for model in client.models.list()] == ["long"]
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="long", prompt=[-1])
        assert server.metric("running_requests") == 1


def test_waiting_requests_are_all_answered(pair: tuple[Path, Path]) -> None:
    done: list[int] = []
    with (
        serving(*pair, "--ctx", WINDOW) as server,
        server.client() as client,
        ThreadPoolExecutor(5) as pool,
        client.completions.create(**LONG, stream=True) as stream,
    ):
        next(iter(stream))
        for i in range(5):

            def ask(number: int = i) -> None:
                client.completions.create(**LONG, max_tokens=3)
                done.append(number)

            pool.submit(ask)
            server.wait_until("queue_requests", i + 1)
        stream.close()
        pool.shutdown()
        assert sorted(done) == list(range(5))


def test_the_key_is_asked_of_everyone_but_for_the_health(pair: tuple[Path, Path]) -> None:
    options = ("--api-key", "secret", "--host", "0.0.0.0", "--cors", "http://page.example")
    with serving(*pair, *options) as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        with server.client("wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
        with server.client("secret") as client:
            assert len(list(client.models.list())) == 1
            client.completions.create(**LONG, max_tokens=1)
        root = server.url.removesuffix("/v1")
        assert httpx2.get(root + "/health").status_code == 200
        assert httpx2.get(root + "/metrics").status_code == 401
        asked = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
        allowed = httpx2.options(server.url + "/completions", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "http://page.example"
        asked["Origin"] = "http://other.example"
        refused = httpx2.options(server.url + "/completions", headers=asked)
        assert "access-control-allow-origin" not in refused.headers


def test_other_machines_need_a_key_or_a_word(pair: tuple[Path, Path]) -> None:
    with pytest.raises(AssertionError, match="give --api-key, or --no-auth"), open_to_all(pair):
        pass
    with open_to_all(pair, "--no-auth") as server:
        assert "serving long on http://0.0.0.0:" in server.said


@pytest.mark.parametrize("key", ["schlüssel", " voilà "])
def test_any_key_can_be_sent(pair: tuple[Path, Path], key: str) -> None:
    with serving(*pair, "--api-key", key) as server:
        given = os.fsencode(key)
        for sent, status in ((given, 200), (given + b"x", 401)):
            headers = {b"Authorization": b"Bearer " + sent.strip()}
            assert httpx2.get(server.url + "/models", headers=headers).status_code == status


def test_an_empty_key_is_refused(pair: tuple[Path, Path]) -> None:
    with (
        pytest.raises(AssertionError, match="key of --api-key is empty"),
        serving(*pair, "--api-key", " "),
    ):
        pass


@pytest.mark.parametrize("host", ["a..b", "x" * 100])
def test_what_is_no_name_of_a_machine_is_said_in_one_line(
    pair: tuple[Path, Path], host: str
) -> None:
    with (
        pytest.raises(AssertionError, match=r"error: cannot listen on [ax]"),
        serving(*pair, "--host", host),
    ):
        pass


def open_to_all(pair: tuple[Path, Path], *args: str) -> Any:
    return serving(*pair, "--host", "0.0.0.0", *args)


def test_a_port_that_is_taken_is_said_in_one_line(pair: tuple[Path, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with (
            pytest.raises(AssertionError, match=r"error: cannot listen on .* port \d+: .*in use"),
            serving(*pair, "--port", port),
        ):
            pass


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_finish_within_the_grace(
    pair: tuple[Path, Path], signum: signal.Signals
) -> None:
    with serving(*pair, "--grace", "60") as server, server.client() as client:
        stream = client.completions.create(**LONG, max_tokens=1500, stream=True)
        events = [next(stream)]
        server.process.send_signal(signum)
        events += stream
        assert events[-1].choices[0].finish_reason == "length"
        code = server.process.wait(60)
    assert code == (130 if signum == signal.SIGINT else 0)


def test_a_signal_cancels_what_is_not_finished_in_time(pair: tuple[Path, Path]) -> None:
    with serving(*pair, "--ctx", WINDOW, "--grace", "0") as server:
        with server.client() as client, ThreadPoolExecutor(1) as pool:
            stream = client.completions.create(**LONG, stream=True)
            next(stream)
            waiting = pool.submit(client.completions.create, **LONG)
            server.wait_until("queue_requests", 1)
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                waiting.result(60)
        assert server.end() == 0
    assert server.said.endswith("\nstopping\n")


def test_killed_in_mid_answer_it_serves_again_at_once(pair: tuple[Path, Path]) -> None:
    with serving(*pair, "--ctx", WINDOW) as server, server.client() as client:
        stream = client.completions.create(**LONG, stream=True)
        next(stream)
        port = str(httpx2.URL(server.url).port)
        server.process.kill()
        server.process.wait(60)
        with pytest.raises(openai.APIConnectionError):
            list(stream)
    with serving(*pair, "--port", port) as server, server.client() as client:
        assert client.completions.create(**LONG, max_tokens=1).choices[0].text


def address(server: Server) -> tuple[str, int]:
    url = httpx2.URL(server.url)
    assert url.port
    return url.host, url.port


def request(body: bytes) -> bytes:
    """Return a POST to /v1/completions as bytes."""
    head = (
        "POST /v1/completions HTTP/1.1",
        "Host: here",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join([*head, "", ""]).encode() + body
