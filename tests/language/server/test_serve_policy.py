"""Tests of the command `rlframe serve policy` in its own process: output, responses and exit."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import socket
import subprocess
import sys
import time

import httpx
import jax
import openai
import pytest

from rlframe.errors import UsageError
from rlframe.language.model import transformer, weights
from rlframe.language.model.tokenizers import ByteTokenizer
from rlframe.programs.policies.served import policy_of_folder
from tests.extras import needs
from tests.language.server.serving import LONG, TINY, params_of
from tests.ports import free_address
from tests.trajectories.serving import ROOT
from tests.waiting import wait_until

DEADLINE = 120.0


@pytest.fixture()
def folder(tmp_path):
    """Create the folder of a model with random weights, in Hugging Face's format."""
    weights.save(tmp_path / "model", TINY, params_of(0))
    ByteTokenizer().save(tmp_path / "model")
    return tmp_path / "model"


def command(*arguments):
    return [sys.executable, "-m", "rlframe", "serve", "policy", *map(str, arguments)]


def client_of(url):
    return openai.OpenAI(base_url=url, api_key="none", timeout=DEADLINE, max_retries=0)


@contextlib.contextmanager
def running(folder, *arguments):
    """Run the command within the `with` block. Yield (process, url)."""
    with open(folder.parent / "log", "wb") as log:
        process = subprocess.Popen(
            command(folder, "--port", 0, *arguments),
            cwd=folder.parent,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            assert selector.select(DEADLINE), "the command did not print its address"
        line = process.stdout.readline()
        assert line.startswith("Policy at http://"), (folder.parent / "log").read_text()
        yield process, line.split()[2]
    finally:
        process.kill()
        process.wait(DEADLINE)
        process.stdout.close()


def refusal(folder, *arguments):
    """Run the command, which must exit with code 2 and print one line. Return this line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command(*arguments), cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_command_completes_a_running_request_after_a_signal(folder, number):
    weights.save(folder, LONG, params_of(0))
    options = {"model": "mine", "prompt": "ab", "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    with running(folder, "--model-name", "mine", "--length", 4096) as (process, url):
        with client_of(url) as client:
            first = client.completions.create(**options)  # compiles
            assert (first.policy_version, first.usage.completion_tokens) == (0, 3000)
            stream = client.completions.create(**options, stream=True, stream_options={"include_usage": True})
            next(stream)
            process.send_signal(number)
            assert list(stream)[-1].usage.completion_tokens == 3000
        assert process.wait(DEADLINE) == 0
    assert (folder.parent / "log").read_text() == ""


@pytest.mark.system
def test_command_exits_although_a_long_request_is_running(folder):
    weights.save(folder, LONG, params_of(0))
    with running(folder) as (process, url), client_of(url) as client:
        stream = client.completions.create(
            model="policy", prompt="ab", max_tokens=30_000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0
        assert time.monotonic() - began < 60
        stream.close()


@pytest.mark.system
def test_command_with_a_learner_address_uses_the_parameters_of_the_learner(folder):
    needs("launchpad")
    from tests import serving
    from tests.language.server.serving import Learner

    address = free_address()
    with running(folder, "--learner", address) as (_, url), client_of(url) as client:
        options = {"model": "policy", "prompt": "ab", "max_tokens": 8, "temperature": 0}
        assert client.completions.create(**options).policy_version == 0
        with serving.serving(Learner(version=5), address):
            wait_until(
                lambda: httpx.get(f"{url}/policy", timeout=DEADLINE).json()["version"] == 5,
                "the server did not get version 5 from the learner",
            )
        assert client.completions.create(**options).policy_version == 5


def test_byte_tokenizer_is_not_the_default_for_large_vocabularies(tmp_path):
    published = dataclasses.replace(TINY, vocab_size=32_000)
    weights.save(tmp_path, published, transformer.init(jax.random.key(0), published))
    with pytest.raises(UsageError, match="has no tokenizer.json, and its model has 32000 tokens"):
        policy_of_folder(str(tmp_path), None, None, None)
    assert policy_of_folder(str(tmp_path), "byte", None, None).tokenizer == "byte"
    weights.save(tmp_path, TINY, params_of(0))
    assert policy_of_folder(str(tmp_path), None, None, None).tokenizer == "byte"


@pytest.mark.system
def test_invalid_command_line_prints_one_line_of_error(tmp_path, folder):
    assert "Name one model: give either MODEL_FOLDER or --run-dir" in refusal(tmp_path)
    assert f"There is no run in {tmp_path / 'nothing'}" in refusal(tmp_path, "--run-dir", "nothing")
    assert "The address of a learner must be HOST:PORT, got 'here'" in refusal(tmp_path, folder, "--learner", "here")
    assert "Did you mean '--model-name'" in refusal(tmp_path, folder, "--model-nam", "x")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"Port {port} of 127.0.0.1 is in use" in refusal(tmp_path, folder, "--port", port)
