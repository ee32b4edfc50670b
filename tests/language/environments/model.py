"""A fake model server with the OpenAI API. Tests set its answers, which contain token ids like vLLM's answers."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

# A function that returns the sampled tokens. Its arguments are the prompt's tokens and the number of the answer.
Reply = Callable[[list[int], int], list[int]]


@dataclasses.dataclass
class Model:
    """Settings of the fake server, and the requests it has received.

    Attributes:
        reply: Returns the sampled tokens for a prompt.
        say: Returns the text of a chat's answer.
        open: While this event is cleared, requests wait.
        failures: Number of further requests that get a 503 response.
        ids: True returns the token ids as vLLM does. False returns them in the field `tokens`, as older vLLM does.
        policy_version: Version of the parameters in the answers. None omits it.
        n_ignored: True ignores `n`, and returns one completion.
        requests: The received requests. Each is a dict with the path and the body's fields.
    """

    reply: Reply = lambda prompt, number: [65 + number % 26]
    say: Callable[[list[dict[str, Any]], int], str] = lambda messages, number: str(number)
    open: threading.Event = dataclasses.field(default_factory=threading.Event)
    failures: int = 0
    ids: bool = True
    policy_version: int | None = None
    n_ignored: bool = False
    requests: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self.open.set()

    def logprob(self, token: int) -> float:
        """Return the log-probability of a token, which is the same at all positions."""
        return -(token + 1) / 64

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.requests.append({"path": path, **body})
            if self.failures > 0:
                self.failures -= 1
                return 503, {"error": {"message": "not now"}}
        assert self.open.wait(60)
        count = 1 if self.n_ignored else body.get("n") or body.get("sampling_params", {}).get("n", 1)
        with self._lock:
            numbers = list(range(self._number, self._number + count))
            self._number += count
        if path == "/generate":
            return 200, [self._generated(body["input_ids"], number) for number in numbers]
        version = {} if self.policy_version is None else {"policy_version": self.policy_version}
        header = {"id": "x", "created": 0, "model": body["model"], **version}
        if path == "/v1/chat/completions":
            texts = [self.say(body["messages"], number) for number in numbers]
            choices = [{"message": {"role": "assistant", "content": text}} for text in texts]
            header["object"] = "chat.completion"
        else:
            prompt = body["prompt"]
            ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
            choices = [self._completed(ids, number) for number in numbers]
            header["object"] = "text_completion"
        choices = [{"index": i, "finish_reason": "stop", "logprobs": None, **c} for i, c in enumerate(choices)]
        return 200, {**header, "choices": choices}

    def _completed(self, prompt: list[int], number: int) -> dict[str, Any]:
        tokens = self.reply(prompt, number)
        logprobs = {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": [self.logprob(token) for token in tokens],
            "top_logprobs": None,
            "text_offset": None,
        }
        ids = {"token_ids": tokens, "prompt_token_ids": prompt} if self.ids else {}
        return {"text": bytes(t for t in tokens if t < 256).decode(errors="replace"), "logprobs": logprobs, **ids}

    def _generated(self, prompt: list[int], number: int) -> dict[str, Any]:
        tokens = self.reply(prompt, number)
        entries = [[self.logprob(token), token, None] for token in tokens]
        return {"text": "", "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": entries}}


@contextlib.contextmanager
def serving(model: Model, port: int = 0) -> Iterator[Model]:
    """Serve the model at `model.url` until the `with` block ends."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*model.answer(self.path, body))

        def do_GET(self) -> None:
            self._send(200, {"object": "list", "data": []})

        def _send(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            with contextlib.suppress(ConnectionError):  # the client has disconnected
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):  # a test may kill the client during a request
                super().handle_error(*_)  # type: ignore[arg-type]

    with Server(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        model.url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield model
        finally:
            model.open.set()
            server.shutdown()
            thread.join()
