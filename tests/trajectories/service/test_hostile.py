"""Tests of hostile requests. The service refuses them with little time and memory, and still works afterwards."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import resource
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import zstandard

from tests.trajectories.queues import SETTINGS
from tests.trajectories.serving import ServiceProcess, running_service
from tests.waiting import wait_until

DEADLINE = 60.0  # maximum seconds for any answer on a busy machine
MAX_ANSWER = 10_000  # maximum bytes of an answer, because an answer must not repeat a long request
JSON, MSGPACK = "application/json", "application/msgpack"

GROUP = {"tokens": [[1, 2], [3, 4, 5]], "masks": [[-100, 2], [-100, 4, 5]], "scores": [0.5, -0.5]}
ENV = {"max_token_length": 100, "desired_name": "env", "weight": 1.0, "group_size": 2}
PACKED = {
    "tokens": np.arange(5, dtype="<i4").tobytes(),
    "masks": np.arange(5, dtype="<i4").tobytes(),
    "scores": np.zeros(2, "<f4").tobytes(),
    "lengths": np.array([2, 3], "<i4").tobytes(),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[ServiceProcess]:
    """Run a service with a registered trainer and environment. The service stores at most 64 MB of groups."""
    with running_service(tmp_path_factory.mktemp("service"), "--max-queue-mb", "64") as running:
        assert send(running, "POST", "/register", SETTINGS)[0] == 200
        assert send(running, "GET", "/batch")[0] == 200
        assert send(running, "POST", "/register-env", ENV)[0] == 200
        yield running


def connect(service: ServiceProcess) -> socket.socket:
    host, _, port = service.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE)


def send(service: ServiceProcess, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
    """Send a request. Return the status and the answer. If the body is not bytes, send it as JSON (NaN is allowed)."""
    connection = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=DEADLINE)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        # The service can answer and disconnect before it has received the whole body.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, path, data, {"Content-Type": JSON, **named})
        with connection.getresponse() as answer:
            return answer.status, answer.read()
    finally:
        connection.close()


def assert_well(service: ServiceProcess) -> None:
    """Check that the service process still runs, and that it accepts and serves groups."""
    assert service.process is not None and service.process.poll() is None
    for _ in range(SETTINGS["batch_size"] // 2):
        assert send(service, "POST", "/scored_data", GROUP) == (200, b'{"status":"received"}')
    status, answer = send(service, "GET", "/batch")
    assert (status, sum(len(item["tokens"]) for item in json.loads(answer)["batch"])) == (200, 8)


def group_with(**fields: Any) -> dict[str, Any]:
    """Return the valid group `GROUP` with the given fields replaced."""
    return {**GROUP, **fields}


def nested(levels: int) -> bytes:
    """Return a group as JSON. Its field `images` is a list with the given number of nested levels."""
    return json.dumps(GROUP).encode()[:-1] + b',"images":' + b"[" * levels + b"]" * levels + b"}"


NAN, INFINITY = float("nan"), float("inf")
GROUPS: dict[str, Any] = {
    "not an object": [1],
    "empty body": b"",
    "not JSON": b"{tokens: [[1]]}",
    "truncated JSON": json.dumps(GROUP).encode()[:-20],
    "two groups": json.dumps(GROUP).encode() * 2,
    "invalid UTF-8": json.dumps(group_with(messages=[[{"role": "?", "content": ""}], []]))
    .encode()
    .replace(b"?", b"\xff\xfe"),
    "lone surrogate": json.dumps(group_with(group_overrides={"a": "\ud800"})).encode(),
    "UTF-16": json.dumps(GROUP).encode("utf-16"),
    "zeros": bytes(1000),
    "no scores": {"tokens": [[1]], "masks": [[1]]},
    "no sequences": {"tokens": [], "masks": [], "scores": []},
    "an empty sequence": {"tokens": [[]], "masks": [[]], "scores": [1.0]},
    "more sequences than a batch": {"tokens": [[1]] * 9, "masks": [[1]] * 9, "scores": [1.0] * 9},
    "ragged masks": group_with(masks=[[1, 2], [3, 4]]),
    "too few masks": group_with(masks=[[1, 2]]),
    "too many scores": group_with(scores=[1.0, 2.0, 3.0]),
    "ragged log-probabilities": group_with(inference_logprobs=[[1.0, 1.0], [1.0]]),
    "ragged distillation": group_with(distill_token_ids=[[[1]], [[1]]], distill_logprobs=[[[1.0, 2.0]], [[1.0]]]),
    "NaN score": group_with(scores=[NAN, 1.0]),
    "infinite score": group_with(scores=[1.0, INFINITY]),
    "score that is too large": json.dumps(GROUP).replace("-0.5", "1e999").encode(),
    "NaN advantage": group_with(advantages=[[1.0, 1.0], [1.0, NAN, 1.0]]),
    "NaN in images": group_with(images={"a": [NAN]}),
    "negative env_id": group_with(env_id=-1),
    "env_id that is too large": group_with(env_id=2**63),
    "env_id of 4,000 digits": json.dumps(group_with(env_id=0))
    .replace('"env_id": 0', f'"env_id": {"9" * 4000}')
    .encode(),
    "env_id that is a fraction": group_with(env_id=0.5),
    "env_id that is true": group_with(env_id=True),
    "token that is too large": group_with(tokens=[[1, 2], [3, 4, 2**31]]),
    "token of 400 digits": group_with(tokens=[[1, 2], [3, 4, 10**400]]),
    "token that is a fraction": group_with(tokens=[[1, 2], [3, 4, 0.5]]),
    "token that is text": group_with(tokens=[[1, 2], [3, 4, "5"]]),
    "token that is null": group_with(tokens=[[1, 2], [3, 4, None]]),
    "tokens that are text": group_with(tokens="12345"),
    "scores that are JSON objects": group_with(scores=[{}, {}]),
    "messages without content": group_with(messages=[[{"role": "user"}], []]),
    "messages that are text": group_with(messages="hello"),
    "policy_version that is too large": group_with(policy_version=2**53 + 1),
    "policy_version that is too small": group_with(policy_version=-(2**53) - 1),
    "nested 33 levels deep": nested(33),
    "nested 100,000 levels deep": nested(100_000),
}


@pytest.mark.parametrize("name", GROUPS)
def test_invalid_group_is_refused_with_422(service, name):
    status, answer = send(service, "POST", "/scored_data", GROUPS[name])
    assert (status, len(answer) < MAX_ANSWER) == (422, True), answer[:500]
    assert all({"loc", "msg", "type"} <= problem.keys() for problem in json.loads(answer)["detail"])


def test_list_with_invalid_group_is_refused_as_a_whole(service):
    before = json.loads(send(service, "GET", "/status")[1])["queue_size"]
    for name, group in GROUPS.items():
        whole = group if isinstance(group, bytes) else json.dumps(group).encode()
        body = b"[" + json.dumps(GROUP).encode() + b"," + whole + b"]"
        status, answer = send(service, "POST", "/scored_data_list", body)
        if name != "two groups":
            assert status == 422, (name, answer[:500])
    assert json.loads(send(service, "GET", "/status")[1])["queue_size"] == before


def packed_bomb(levels: int) -> bytes:
    return msgspec.msgpack.encode(GROUP)[1:].join([b"\x84", b"\xa6images" + b"\x91" * levels + b"\xc0"])


PACKED_GROUPS: dict[str, Any] = {
    "empty body": b"",
    "not MessagePack": b"\xc1",
    "truncated MessagePack": msgspec.msgpack.encode(PACKED)[:-5],
    "array with a declared length of 4 billion": b"\x83\xa6tokens\xdd\xff\xff\xff\xff",
    "bytes with a declared length of 4 billion": b"\x83\xa6tokens\xc6\xff\xff\xff\xff",
    "nested 100,000 levels deep": packed_bomb(100_000),
    "invalid UTF-8": b"\x81\xa2\xff\xfe\xc0",
    "no lengths": {name: value for name, value in PACKED.items() if name != "lengths"},
    "lengths that are too few": {**PACKED, "lengths": np.array([2], "<i4").tobytes()},
    "lengths that are too large": {**PACKED, "lengths": np.array([2, 2**31 - 1], "<i4").tobytes()},
    "lengths that are negative": {**PACKED, "lengths": np.array([6, -1], "<i4").tobytes()},
    "lengths that are zero": {**PACKED, "lengths": np.array([5, 0], "<i4").tobytes()},
    "lengths with an incomplete int32": {**PACKED, "lengths": b"\x02\x00\x00\x00\x03"},
    "tokens with an incomplete int32": {**PACKED, "tokens": PACKED["tokens"][:-1]},
    "masks of other lengths": {**PACKED, "masks": PACKED["masks"][:-4]},
    "NaN scores": {**PACKED, "scores": np.full(2, NAN, "<f4").tobytes()},
    "infinite advantages": {**PACKED, "advantages": np.full(5, INFINITY, "<f4").tobytes()},
    "an extension type": {**GROUP, "images": msgspec.msgpack.Ext(5, b"x")},
    "a timestamp": {**GROUP, "images": msgspec.msgpack.Ext(-1, bytes(4))},
    "binary in images": {**GROUP, "images": b"\xff"},
    "keys that are numbers": {1: 2},
}


@pytest.mark.parametrize("name", PACKED_GROUPS)
def test_invalid_messagepack_group_is_refused_with_422(service, name):
    body = PACKED_GROUPS[name]
    body = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    status, answer = send(service, "POST", "/scored_data", body, Content_Type=MSGPACK)
    assert (status, len(answer) < MAX_ANSWER) == (422, True), answer[:500]
    assert json.loads(answer)["detail"]


def settings(**fields: Any) -> dict[str, Any]:
    return {**SETTINGS, "wandb_group": "hostile", **fields}


def env(**fields: Any) -> dict[str, Any]:
    return {**ENV, **fields}


LONG = "x" * 10_000
REQUESTS: dict[str, tuple[str, str, Any]] = {
    "batch_size 0": ("POST", "/register", settings(batch_size=0)),
    "batch_size -1": ("POST", "/register", settings(batch_size=-1)),
    "batch_size of 31 digits": ("POST", "/register", settings(batch_size=10**30)),
    "batch_size NaN": ("POST", "/register", settings(batch_size=NAN)),
    "batch_size 1e300": ("POST", "/register", settings(batch_size=1e300)),
    "batch_size text": ("POST", "/register", settings(batch_size="many")),
    "starting_step of 31 digits": ("POST", "/register", settings(starting_step=10**30)),
    "lapse_after NaN": ("POST", "/register", settings(lapse_after=NAN)),
    "lapse_after -1": ("POST", "/register", settings(lapse_after=-1)),
    "lapse_after infinite": ("POST", "/register", settings(lapse_after=INFINITY)),
    "max_staleness -1": ("POST", "/register", settings(max_staleness=-1)),
    "stale unknown": ("POST", "/register", settings(stale="burn")),
    "a name of 10,000 characters": ("POST", "/register", settings(wandb_group=LONG)),
    "lone surrogate": ("POST", "/register", settings(wandb_group="\ud800")),
    "register without a body": ("POST", "/register", None),
    "register a list": ("POST", "/register", [1]),
    "group_size 0": ("POST", "/register-env", env(group_size=0)),
    "group_size -1": ("POST", "/register-env", env(group_size=-1)),
    "group_size 2**63": ("POST", "/register-env", env(group_size=2**63)),
    "weight NaN": ("POST", "/register-env", env(weight=NAN)),
    "weight infinite": ("POST", "/register-env", env(weight=INFINITY)),
    "max_token_length 2**63": ("POST", "/register-env", env(max_token_length=2**63)),
    "min_batch_allocation 1.5": ("POST", "/register-env", env(min_batch_allocation=1.5)),
    "min_batch_allocation NaN": ("POST", "/register-env", env(min_batch_allocation=NAN)),
    "desired_name with a lone surrogate": ("POST", "/register-env", env(desired_name="\udfff")),
    "env_id of 31 digits": ("POST", "/disconnect-env", {"env_id": 10**30}),
    "env_id text": ("POST", "/heartbeat", {"env_id": "x"}),
    "status without env_id": ("GET", "/status-env", None),
    "status of an env_id of 31 digits": ("GET", f"/status-env?env_id={10**30}", None),
    "status with an env_id that is text": ("GET", "/status-env", b'{"env_id": "x"}'),
    "status nested deep": ("GET", "/status-env", b"[" * 100_000),
    "register nested deep": ("POST", "/register", b"[" * 100_000),
    "policy version 2**54": ("POST", "/policy-version", {"policy_version": 2**54}),
    "wait infinite": ("GET", "/batch?wait=inf", None),
    "wait for NaN": ("GET", "/batch?wait=nan", None),
    "wait for an hour": ("GET", "/batch?wait=3600", None),
    "lease 0": ("GET", "/batch?lease=0", None),
    "lease NaN": ("GET", "/batch?lease=nan", None),
    "lease 1e300": ("GET", "/batch?lease=1e300", None),
    "a consumer of 10,000 characters": ("GET", f"/batch?consumer={LONG}", None),
    "policy_version -1e16": ("GET", f"/batch?policy_version={-(10**16)}", None),
    "batch_id of 31 digits": ("POST", f"/batch/{10**30}/ack", None),
    "batch_id text": ("POST", "/batch/x/nack", None),
    "count 0": ("GET", "/latest?count=0", None),
    "count of 31 digits": ("GET", f"/latest?count={10**30}", None),
    "a run name with a space": ("GET", "/runs/a%20b/status", None),
    "a run name of 65 characters": ("GET", f"/runs/{'r' * 65}/status", None),
    "a run name that is not UTF-8": ("GET", "/runs/%ff%00/status", None),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_invalid_request_is_refused(service, name):
    method, path, body = REQUESTS[name]
    status, answer = send(service, method, path, body)
    assert (status in (400, 422), len(answer) < MAX_ANSWER) == (True, True), (status, answer[:500])


def test_run_name_cannot_be_a_path(service):
    for name in ("..", "%2e%2e", "..%2f..%2fetc", "a/b"):
        # 200: the server takes the path as a valid run name
        assert send(service, "GET", f"/runs/{name}/status")[0] in (
            200,
            404,
            422,
        )
    assert send(service, "GET", "/runs/..%2f..%2fetc%2fpasswd/status")[0] == 404


HEADERS: dict[str, tuple[bytes, dict[str, str], int]] = {
    "an unknown encoding": (b"{}", {"Content-Encoding": "br"}, 415),
    "invalid gzip": (b"{}", {"Content-Encoding": "gzip"}, 400),
    "truncated gzip": (gzip.compress(json.dumps(GROUP).encode())[:-9], {"Content-Encoding": "gzip"}, 400),
    "gzip with a wrong checksum": (
        gzip.compress(json.dumps(GROUP).encode())[:-8] + bytes(8),
        {"Content-Encoding": "gzip"},
        400,
    ),
    "gzip of many empty members": (gzip.compress(b"") * 500_000, {"Content-Encoding": "gzip"}, 400),
    "1000 encodings": (b"{}", {"Content-Encoding": ", ".join(["gzip"] * 1000)}, 415),
    "zstd of many empty frames": (zstandard.compress(b"") * 500_000, {"Content-Encoding": "zstd"}, 400),
    "invalid zstd": (b"{}", {"Content-Encoding": "zstd"}, 400),
    "truncated zstd": (zstandard.compress(json.dumps(GROUP).encode())[:-5], {"Content-Encoding": "zstd"}, 400),
    "a key of 10,000 characters": (json.dumps(GROUP).encode(), {"Idempotency-Key": LONG}, 422),
    "an unknown content type": (b"<group/>", {"Content-Type": "application/xml"}, 422),
    "an invalid content type": (b"<group/>", {"Content-Type": "\xe4\xf6\xfc"}, 422),
    "an unknown charset": (json.dumps(GROUP).encode("utf-16"), {"Content-Type": f"{JSON}; charset=utf-16"}, 422),
}


@pytest.mark.parametrize("name", HEADERS)
def test_undecodable_body_is_refused(service, name):
    body, headers, expected = HEADERS[name]
    status, answer = send(service, "POST", "/scored_data", body, **headers)
    assert (status, len(answer) < MAX_ANSWER) == (expected, True), answer[:500]


POST = b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\n"
RAW: dict[str, bytes] = {
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "an unknown HTTP version": b"GET / HTTP/9.9\r\n\r\n",
    "a negative length": POST + b"Content-Length: -5\r\n\r\nhello",
    "a length that is text": POST + b"Content-Length: many\r\n\r\nhello",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "a chunk without a size": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "zeros": bytes(10_000),
}


@pytest.mark.parametrize("name", RAW)
def test_service_answers_invalid_http_with_error_or_disconnects(service, name):
    with connect(service) as connection:
        connection.sendall(RAW[name])
        with contextlib.suppress(ConnectionResetError):
            answer = connection.recv(MAX_ANSWER)
            assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 503")), answer
    assert send(service, "GET", "/status")[0] == 200


def resident(service: ServiceProcess) -> int:
    """Return the resident memory of the service, in bytes."""
    assert service.process is not None
    return psutil.Process(service.process.pid).memory_info().rss


def peak(service: ServiceProcess) -> int:
    """Return the peak resident memory of the service, in bytes."""
    assert service.process is not None
    with open(f"/proc/{service.process.pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def chunked(service: ServiceProcess, megabytes: int) -> bytes:
    """Send a body in chunks, without a Content-Length header. Return the first bytes of the answer."""
    with connect(service) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(megabytes):
                connection.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
        with contextlib.suppress(ConnectionResetError):
            return connection.recv(12)
        return b""


@pytest.mark.system
def test_large_bodies_and_bombs_are_refused_without_memory_growth(service):
    """The test sends all requests four times. Memory must not grow after the first time."""
    large = json.dumps(GROUP).encode() + b" " * 100_000_000
    gzip_bomb = gzip.compress(bytes(500_000_000), 6)
    zstd_bomb = zstandard.ZstdCompressor(level=1).compress(bytes(500_000_000))
    two_members = gzip.compress(bytes(60_000_000), 1) * 2
    not_a_number = b'{"scores":[1],"masks":[],"tokens":[[NaN,' + b"1," * 30_000_000 + b"1]]}"
    after = []
    for _ in range(4):
        assert send(service, "POST", "/scored_data", large)[0] == 413
        assert send(service, "POST", "/register", large)[0] == 413
        assert chunked(service, 100) == b"HTTP/1.1 413"
        for bomb, encoding in ((gzip_bomb, "gzip"), (two_members, "gzip"), (zstd_bomb, "zstd")):
            assert send(service, "POST", "/scored_data", bomb, Content_Encoding=encoding)[0] == 413
            assert send(service, "POST", "/register", bomb, Content_Encoding=encoding)[0] == 413
        assert send(service, "POST", "/scored_data", gzip.compress(gzip_bomb), Content_Encoding="gzip, gzip")[0] == 413
        for levels in (100_000, 10_000_000):
            assert send(service, "POST", "/scored_data", nested(levels))[0] == 422
        assert send(service, "POST", "/scored_data", not_a_number)[0] == 422
        assert_well(service)
        after.append(resident(service))
    assert after[-1] - after[0] < 32 << 20, after
    assert peak(service) < 800 << 20


def test_full_queue_refuses_groups_until_batches_are_taken(service):
    """If the queue has 64 MB, the service answers with status 503 and a Retry-After header."""
    group = json.dumps({"tokens": [[7] * 500_000], "masks": [[7] * 500_000], "scores": [1.0]}).encode()
    statuses = []
    while not statuses or (statuses[-1] == 200 and len(statuses) < 64):
        statuses.append(send(service, "POST", "/scored_data", group)[0])
    assert (statuses[-1], set(statuses[:-1])) == (503, {200})
    connection = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=DEADLINE)
    connection.request("POST", "/scored_data", group)
    with connection.getresponse() as answer:
        assert (answer.status, int(answer.headers["Retry-After"]) >= 1) == (503, True)
        assert json.loads(answer.read())["status"] == "full"
    connection.close()
    while json.loads(send(service, "GET", "/status")[1])["queue_size"] >= 8:
        assert send(service, "GET", "/batch")[0] == 200
    assert send(service, "POST", "/reset_data")[0] == 200
    assert send(service, "POST", "/register", SETTINGS)[0] == 200
    assert_well(service)


@contextlib.contextmanager
def opened(service: ServiceProcess, count: int, first: bytes) -> Iterator[list[socket.socket]]:
    """Open `count` connections, and send the bytes `first` over each connection."""
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(count):
            connection = stack.enter_context(connect(service))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(first)
            connections.append(connection)
        yield connections


def status_line(connection: socket.socket) -> bytes:
    """Return the first 12 bytes of the answer, or b"" if the service disconnected."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(12)
    return b""


def check_many_connections(service: ServiceProcess, count: int) -> None:
    before = resident(service)
    with opened(service, count, b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n") as connections:
        answers = [status_line(connection) for connection in connections]
    assert set(answers) == {b"HTTP/1.1 200", b"HTTP/1.1 503"}
    # wait until the service has detected the closed connections
    wait_until(lambda: send(service, "GET", "/status")[0] == 200)
    assert resident(service) - before < 200 << 20


def test_connections_beyond_the_limit_get_503(tmp_path):
    with running_service(tmp_path, "--max-connections", "100") as service:
        check_many_connections(service, 300)


@pytest.mark.system
def test_ten_thousand_connections_are_answered(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 10_500:
        pytest.skip(f"A process may open {hard} files here; ulimit -Hn 10500 is needed.")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 10_500), hard))
    try:
        with running_service(tmp_path) as service:
            check_many_connections(service, 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


SLOW_HEAD = POST + b"Content-Length: 1000000\r\n\r\n{"


def test_slow_clients_do_not_block_other_clients(service):
    with opened(service, 200, SLOW_HEAD) as connections:
        for _ in range(3):
            assert_well(service)
            for connection in connections:
                # On a slow machine, the service has already closed the connection.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(b" ")
    assert_well(service)


@pytest.mark.system
def test_service_disconnects_clients_with_incomplete_requests(service):
    """Some clients send nothing, some stop in the middle of the body, and some send one byte at a time."""
    end = time.monotonic() + 120.0
    with (
        opened(service, 20, SLOW_HEAD) as still,
        opened(service, 20, SLOW_HEAD) as dripping,
        opened(service, 20, b"GET /status HTTP/1.1\r\nX-A: ") as heads,
        opened(service, 20, b"") as silent,
    ):
        waiting = {*still, *dripping, *heads, *silent}
        while waiting:
            assert time.monotonic() < end, f"{len(waiting)} connections are still open"
            time.sleep(0.5)
            for connection in tuple(waiting):
                connection.setblocking(False)
                with contextlib.suppress(BlockingIOError, ConnectionResetError, BrokenPipeError):
                    if connection in dripping or connection in heads:
                        connection.send(b"x")
                    answer = connection.recv(12)
                    assert answer in (b"", b"HTTP/1.1 408"), answer
                    waiting.discard(connection)
    assert_well(service)
