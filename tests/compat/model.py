"""A fake model for environments: an OpenAI-compatible endpoint that answers with digits, and a tokenizer."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import pathlib
import threading
from collections.abc import Iterator


class _Completions(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    numbers = itertools.count()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        number = next(self.numbers)
        message = {"role": "assistant", "content": str(number % 19)}
        answer = {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": 0,
            "model": "stub",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def completions() -> Iterator[str]:
    """Serve the endpoint during the `with` block. Yield its base URL."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Completions) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


def write_tokenizer(folder: pathlib.Path) -> pathlib.Path:
    """Write a tokenizer that `AutoTokenizer` can load. Its tokens are the numbers up to 18 and a few words."""
    folder.mkdir()
    words = ["<unk>", "<eos>", "user", "assistant", "+", *map(str, range(19))]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | parts))
    template = (
        "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} <eos> {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "<eos>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
