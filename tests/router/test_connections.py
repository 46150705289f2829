"""Connections of real clients that misbehave, on loopback sockets: each is answered or cut, and the next is served."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.router_process import RunningRouter, run_router
from cluster.runtime import RouterSpec
from core.config import ClusterConfig
from core.ids import Epoch, RouterId
from router import connections, incoming
from tests.router.scripted import write_model

pytestmark = pytest.mark.process

TIMEOUT_S = 20.0
BODY = b'{"prompt": "a"}'


def start(directory: Path, **router: int) -> RunningRouter:
    settings = {"schema_version": 1, "name": "t", "model": {"path": str(directory)}, "router": {"port": 0, **router}}
    config = ClusterConfig.model_validate(settings)
    return run_router(RouterSpec(id=RouterId("router-0"), epoch=Epoch(1), config=config, model_path=directory))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRouter]:
    router = start(write_model(tmp_path_factory.mktemp("model")))
    yield router
    router.stop()


@pytest.fixture
def router(running: RunningRouter) -> Iterator[RunningRouter]:
    """Serves the next client whatever the last one did."""
    yield running
    assert httpx.get(f"{running.url}/health", trust_env=False, timeout=TIMEOUT_S).status_code == 200
    assert running.failure is None


def connect(router: RunningRouter) -> socket.socket:
    host, port = router.url.removeprefix("http://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), TIMEOUT_S)


def head(length: int | None = None, *others: tuple[str, str]) -> bytes:
    given = {"host": "router", "content-type": "application/json", **dict(others)}
    if length is not None:
        given["content-length"] = str(length)
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"POST /v1/completions HTTP/1.1\r\n{lines}\r\n".encode()


def read_all(client: socket.socket) -> bytes:
    """Everything until the other side closes or cuts the connection."""
    data = b""
    try:
        while part := client.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


def read_answer(client: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One answer of a connection that stays open: status, headers, body."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(65536)
        assert part, data
        data += part
    start_line, *lines = data.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = data.partition(b"\r\n\r\n")[2]
    while len(body) < int(headers["content-length"]):
        body += client.recv(65536)
    return int(start_line.split()[1]), headers, body


def message_of(body: bytes) -> str:
    return str(json.loads(body)["error"]["message"])


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + b"\x00" * 40 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n\r\n" + b"x" * 10 + b"\r\n\r\n",
        head(None, ("x", "y" * (connections.HEAD_BYTES_MAX + 1000))),
        head(None, ("transfer-encoding", "chunked")) + b"zz\r\n{}\r\n0\r\n\r\n",
    ],
    ids=["tls", "header", "length", "lengths", "no-length", "large", "chunk"],
)
def test_connection_is_refused_with_the_envelope_when_it_does_not_speak_http(
    router: RunningRouter, request_bytes: bytes
) -> None:
    with connect(router) as client:
        client.sendall(request_bytes)
        data = read_all(client)
    assert b'"code":400' in data or b'"code":415' in data, data
    assert b"Traceback" not in data and b"500" not in data.partition(b"\r\n")[0]


def test_chunked_body_is_read_as_any_other(router: RunningRouter) -> None:
    """Without workers a good body is told so."""
    with connect(router) as client:
        parts = [BODY[:5], BODY[5:]]
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        client.sendall(head(None, ("transfer-encoding", "chunked")) + chunks)
        status, headers, body = read_answer(client)
    assert status == 503 and int(headers["retry-after"]) >= 1 and "decode" in message_of(body)


def test_body_that_is_longer_than_it_says_is_the_next_request(router: RunningRouter) -> None:
    with connect(router) as client:
        client.sendall(head(len(BODY)) + BODY + b"trailing garbage\r\n\r\n")
        data = read_all(client)
    assert data.startswith(b"HTTP/1.1 503") and b"HTTP/1.1 400" in data


def test_body_that_is_shorter_than_it_says_is_refused_in_time(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "BODY_TIMEOUT_S", 0.2)
    with connect(router) as client:
        client.sendall(head(len(BODY) + 100) + BODY)
        status, _headers, body = read_answer(client)
    assert status == 408 and "did not arrive" in message_of(body)


def test_body_too_large_is_refused_before_it_is_sent(router: RunningRouter) -> None:
    with connect(router) as client:
        client.sendall(head(incoming.BODY_BYTES_MAX + 1, ("expect", "100-continue")))
        status, _headers, body = read_answer(client)
    assert status == 413 and "larger" in message_of(body)


def test_client_gets_its_413_although_it_sends_everything(router: RunningRouter) -> None:
    content = b" " * (incoming.BODY_BYTES_MAX + 1)
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{router.url}/v1/completions", content=content, headers=headers, trust_env=False, timeout=60)
    assert answer.status_code == 413


def test_router_goes_on_when_clients_hang_up_in_their_bodies(router: RunningRouter) -> None:
    for _ in range(20):
        with connect(router) as client:
            client.sendall(head(1_000_000) + b" " * 200_000)
    with connect(router) as client:
        client.sendall(head(len(BODY)) + BODY)
        assert read_answer(client)[0] == 503


def test_connection_is_cut_when_it_sends_no_whole_head(router: RunningRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.3)
    with connect(router) as idle, connect(router) as slow:
        began_s = time.monotonic()
        slow.sendall(b"GET /health HT")
        ended = threading.Event()

        def drip() -> None:
            while not ended.wait(0.05):
                try:
                    slow.sendall(b"x")
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        assert read_all(idle) == read_all(slow) == b""
        ended.set()
        thread.join()
    assert time.monotonic() - began_s < TIMEOUT_S / 2


def test_connection_is_cut_when_its_client_does_not_read(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers to many requests fill every buffer on the way, and then nobody takes them."""
    monkeypatch.setattr(connections, "WRITE_TIMEOUT_S", 0.3)
    with connect(router) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(0.5)
        request = b"GET /openapi.json HTTP/1.1\r\nhost: a\r\n\r\n"
        deadline_s = time.monotonic() + TIMEOUT_S
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while time.monotonic() < deadline_s:
                try:
                    client.sendall(request * 10)
                except TimeoutError:
                    continue


def test_connections_over_the_limit_are_told_so(tmp_path: Path) -> None:
    router = start(write_model(tmp_path), max_connections=3)
    try:
        held = [connect(router) for _ in range(3)]
        for client in held:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            assert read_answer(client)[0] == 200
        with connect(router) as extra:
            extra.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            status, headers, body = read_answer(extra)
            assert (status, headers["connection"]) == (503, "close") and int(headers["retry-after"]) >= 1
            assert "too many connections" in message_of(body)
            assert read_all(extra) == b""
        for client in held:
            client.close()
        deadline_s = time.monotonic() + TIMEOUT_S
        while httpx.get(f"{router.url}/health", trust_env=False).status_code != 200:
            assert time.monotonic() < deadline_s
    finally:
        router.stop()


def test_requests_of_one_connection_are_answered_in_order(router: RunningRouter) -> None:
    with connect(router) as client:
        request = "GET /{} HTTP/1.1\r\nhost: a\r\nx-request-id: {}\r\n\r\n"
        client.sendall("".join(request.format("version", number) for number in range(20)).encode())
        client.sendall(b"GET /version HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx-request-id: 20\r\n\r\n")
        data = read_all(client).decode()
    ids = [line.split(": ")[1] for line in data.split("\r\n") if line.startswith("x-request-id: ")]
    assert ids == [str(number) for number in range(21)]
