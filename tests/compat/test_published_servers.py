"""Test that the unchanged server classes of atroposlib and its `managed_server` can use our endpoint `/generate`."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import numpy as np
import pytest

from rlframe.language.model import transformer
from rlframe.language.model.tokenizers import ByteTokenizer
from tests.compat.test_published_environments import DEADLINE, PYTHON
from tests.language.server.serving import TINY, params_of, serving_policy

pytestmark = pytest.mark.compat


@pytest.mark.parametrize("server_type", ["vllm", "sglang"])
def test_managed_server_of_atroposlib_returns_the_tokens_of_the_model(server_type, tmp_path):
    ByteTokenizer().save(tmp_path / "tokenizer")
    script = pathlib.Path(__file__).with_name("sampling.py")
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with serving_policy() as server:
        command = [PYTHON, script, server_type, server.url(), tmp_path / "tokenizer"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env={**os.environ, **offline})
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    prompt = list(ByteTokenizer().apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True))
    assert set(found["reasons"]) <= {"length", "stop"} and len(found["nodes"]) == 2
    for node, text in zip(found["nodes"], found["texts"]):
        tokens, answer = node["tokens"], node["tokens"][len(prompt) :]
        assert tokens[: len(prompt)] == prompt and 0 < len(answer) <= 6
        assert node["masks"] == [-100] * len(prompt) + answer
        computed = transformer.token_log_probs(params_of(0), TINY, np.array([tokens]))[0, len(prompt) - 1 :]
        assert node["logprobs"] == pytest.approx([1.0] * len(prompt) + computed.tolist(), abs=1e-4)
        assert text == ByteTokenizer().decode(answer, skip_special_tokens=True)
