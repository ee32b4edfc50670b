"""Test that environments with atroposlib's unchanged BaseEnv, in `serve` mode, can send groups to our service.

`make test-compat` installs the Python environment for these tests: `atroposlib` 0.4.0 and its dependencies.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.compat.model import completions, write_tokenizer
from tests.trajectories.serving import ROOT, ServiceProcess, outer_address, running_service

pytestmark = pytest.mark.compat

PYTHON = pathlib.Path(os.environ.get("RLFRAME_COMPAT_PYTHON", ROOT / ".venv-compat/bin/python"))
DEADLINE = 120.0  # seconds for any operation, on a busy machine
BATCH_SIZE = 8
KEYS = {
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs"),
    *("overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs"),
}


class Trainer:
    """A client that sends the requests of a real trainer: it registers, then polls `/batch` until it receives a batch.

    Args:
        url: URL of the service.
        host: Value of the `Host` header. None means the host in the URL.
    """

    def __init__(self, url: str, host: str | None = None) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json"} | ({} if host is None else {"Host": host})

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers, method=method)
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            content = answer.read()
            return json.loads(content) if answer.headers.get_content_type() == "application/json" else content.decode()

    def register(self) -> None:
        settings = {"wandb_group": "group", "wandb_project": "project", "batch_size": BATCH_SIZE, "max_token_len": 64}
        settings |= {"checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1000}
        assert self.ask("POST", "/register", settings)["uuid"] > 0
        assert self.ask("GET", "/batch") == {"batch": None}

    def pull(self) -> list[dict[str, Any]]:
        """Return the next batch. Check that the batch is exactly full, and that its items have all keys."""
        end = time.monotonic() + DEADLINE
        while (batch := self._poll()) is None:
            assert time.monotonic() < end, "no batch arrived in time"
            time.sleep(0.02)
        return batch

    def pull_while(self, environment: Environment) -> Iterator[list[dict[str, Any]]]:
        """Yield batches while the process of the environment runs."""
        end = time.monotonic() + DEADLINE
        while environment.process.poll() is None:
            assert time.monotonic() < end, "the environment's process did not exit in time"
            if (batch := self._poll()) is not None:
                yield batch
            time.sleep(0.02)

    def _poll(self) -> list[dict[str, Any]] | None:
        batch = self.ask("GET", "/batch")["batch"]
        if batch is not None:
            assert sum(len(item["tokens"]) for item in batch) == BATCH_SIZE
            assert all(item.keys() == KEYS for item in batch)
        return batch

    def drain(self) -> int:
        """Take all batches. Return the number of batches."""
        count = 0
        while self.ask("GET", "/batch")["batch"] is not None:
            count += 1
        return count

    @property
    def queued(self) -> int:
        return self.ask("GET", "/status")["queue_size"]


class Environment:
    """A process that runs an environment and writes a log."""

    def __init__(
        self, name: str, folder: pathlib.Path, url: str, model: str, variables: dict[str, str], **options: Any
    ) -> None:
        self._log = folder / f"{name}.log"
        options = {
            "env.rollout_server_url": url,
            "env.tokenizer_name": folder / "tokenizer",
            "openai.base_url": model,
            **{f"env.{option}": value for option, value in options.items()},
        }
        command = [str(PYTHON), str(ROOT / "tests/compat/environment.py"), name, "serve"]
        for option, value in options.items():
            command += [f"--{option}", str(value)]
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "disabled"}
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, stdout=log, stderr=log, env={**os.environ, **offline, **variables}
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def looks(self) -> list[int]:
        """The `queue_size` in each response of /status-env that the environment has logged."""
        return [int(size) for size in re.findall(r"Status dict: .*'queue_size': (\d+)", self.log)]

    def wait_until(self, true: Callable[[], Any]) -> None:
        end = time.monotonic() + DEADLINE
        while not true():
            assert self.process.poll() is None and time.monotonic() < end, self.log[-5000:]
            time.sleep(0.05)

    def look_again(self, times: int = 10) -> list[int]:
        """Wait until the environment has requested its status this many times. Return the queue sizes."""
        before = len(self.looks)
        self.wait_until(lambda: len(self.looks) >= before + times)
        return self.looks[before:]


@pytest.fixture
def service(request, tmp_path) -> Iterator[ServiceProcess]:
    """Run a service. A test can set the service's command-line arguments with `parametrize`."""
    if not PYTHON.exists():
        pytest.fail(f"There is no {PYTHON}: run `make test-compat`, or set RLFRAME_COMPAT_PYTHON to another Python.")
    with running_service(tmp_path, *getattr(request, "param", ())) as running:
        yield running


@pytest.fixture
def environment(tmp_path, service) -> Iterator[Callable[..., Environment]]:
    """Return a function that starts an environment. Kill all started environments after the test."""
    write_tokenizer(tmp_path / "tokenizer")
    started: list[Environment] = []

    def start(
        name: str, url: str | None = None, variables: dict[str, str] | None = None, **options: Any
    ) -> Environment:
        started.append(Environment(name, tmp_path, url or service.url, model, variables or {}, **options))
        return started[-1]

    with completions() as model, contextlib.ExitStack() as stack:
        stack.callback(lambda: [(one.process.kill(), one.process.wait(DEADLINE)) for one in started])
        yield start


def check_tokens(item: dict[str, Any]) -> None:
    """Check that the question's tokens are masked and that the answer's tokens are unmasked."""
    for tokens, mask in zip(item["tokens"], item["masks"]):
        assert len(tokens) == len(mask) == 8
        assert mask == [-100] * 6 + tokens[6:]


def test_environment_sends_groups_and_pauses_and_continues(service, environment):
    trainer = Trainer(service.url)
    sums = environment("sums", total_steps=100_000)
    sums.wait_until(lambda: "wait for trainer to start" in sums.log)
    trainer.register()
    sums.wait_until(lambda: "Initialized env with id 0" in sums.log)

    for _ in range(5):
        for item in trainer.pull():
            check_tokens(item)
            assert (item["env_id"], len(item["tokens"]), set(item["scores"])) == (0, 4, {0.0, 1.0})
            assert [message["role"] for message in item["messages"][0]] == ["user", "assistant"]
            assert item["advantages"] == [] and item["distill_token_ids"] is None

    # The trainer stops pulling. The environment sends three batches (`max_batches_offpolicy`), then it waits.
    limit = 3 * BATCH_SIZE // 4
    sums.wait_until(lambda: sums.looks[-1] >= limit)
    full = trainer.queued
    assert limit <= full <= 2 * limit
    assert set(sums.look_again()) == {full} and trainer.queued == full

    # The trainer pulls again, and the environment continues.
    for _ in range(full):
        trainer.pull()
    assert trainer.ask("GET", "/status")["current_step"] == 5 + full

    # All environments are paused for an evaluation.
    assert trainer.ask("POST", "/pause", {}) == {"status": "success"}
    held = sums.look_again()[-1]
    assert held >= limit
    trainer.drain()
    left = trainer.queued
    assert left < BATCH_SIZE // 4
    assert sums.look_again()[-1] >= limit and trainer.queued == left
    assert trainer.ask("POST", "/resume", {}) == {"status": "success"}
    for _ in range(3):
        trainer.pull()

    assert sums.process.poll() is None
    assert "Client error" not in sums.log and "Server error" not in sums.log
    assert trainer.ask("POST", "/disconnect-env", {"env_id": 0}) == {"status": "success"}


def test_two_environments_with_different_group_sizes_share_batches(service, environment):
    """The first environment sends pairs of groups. At least a quarter of each batch must come from it."""
    trainer = Trainer(service.url)
    trainer.register()
    options = {"total_steps": 20, "ensure_scores_are_not_same": False}
    pairs = environment("pairs", group_size=2, min_batch_allocation=0.25, **options)
    pairs.wait_until(lambda: "Initialized env with id 0" in pairs.log)
    sums = environment("sums", **options)
    sums.wait_until(lambda: "Initialized env with id 1" in sums.log)
    sums.look_again(2)
    of_sums = 0
    for batch in trainer.pull_while(pairs):
        of_pairs = [item for item in batch if item["env_id"] == 0]
        assert sum(len(item["tokens"]) for item in of_pairs) >= 2
        for item in of_pairs:
            check_tokens(item)
            assert item["inference_logprobs"] == [[1.0] * 6 + [-0.5] * 2] * 2
            assert len(item["overrides"]) == 2 and len(item["group_overrides"]["question"]) == 2
        of_sums += sum(item["env_id"] == 1 for item in batch)
    assert of_sums > 0
    # The first environment has ended without calling /disconnect-env. The queue still reserves its share of each
    # batch for two minutes, unless another client disconnects the environment.
    assert trainer.ask("POST", "/disconnect-env", {"env_id": 0}) == {"status": "success"}
    for _ in trainer.pull_while(sums):
        pass
    for one in (pairs, sums):
        assert one.process.wait(DEADLINE) == 0, one.log[-5000:]
        assert "Client error" not in one.log and "Server error" not in one.log


@pytest.mark.parametrize("service", [("--host", "0.0.0.0", "--no-token")], indirect=True)
def test_environment_on_another_machine_finds_the_service_by_its_container_name(service, environment):
    """The environment and the trainer send no token. The trainer starts with GET /reset_data, like some trainers."""
    name, port = "rollout-server", service.url.rpartition(":")[2]
    assert "every client that reaches this service, from any machine" in service.log.read_text()
    trainer = Trainer(f"http://{outer_address()}:{port}", host=f"{name}:{port}")
    assert trainer.ask("GET", "/reset_data") == "Reset successful"
    trainer.register()
    variables = {"RESOLVES": f"{name}={outer_address()}"}
    sums = environment("sums", f"http://{name}:{port}", variables, total_steps=100_000)
    for _ in range(3):
        for item in trainer.pull():
            check_tokens(item)
    assert sums.process.poll() is None
    assert "Client error" not in sums.log and "Server error" not in sums.log
