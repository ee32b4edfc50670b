"""Test that an environment written for `atroposlib` runs after only its imports are changed."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.language.environments.model import Model, serving
from tests.language.environments.running import DEADLINE, pull, trainer
from tests.trajectories.serving import ROOT, running_service

CHECKOUT = os.environ.get("RLFRAME_ATROPOS_CHECKOUT")  # of github.com/NousResearch/atropos
_IMPORT = re.compile(r"from atroposlib(\.[a-z_.]+)? import")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with running_service(tmp_path_factory.mktemp("service")) as service:
        yield service


def copy_with_new_imports(file: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Copy a file and the other modules of its folder, and change their imports. Return the path of the file's copy."""
    for other in file.parent.glob("*.py"):
        text, changed = _IMPORT.subn("from rlframe.language import", other.read_text())
        assert changed or other != file
        (folder / other.name).write_text(text)
    return folder / file.name


def run_environment(url, folder, model, command, steps: int = 3):
    """Run an environment's `serve` command for `steps` batches. Return the groups of these batches."""
    flags = {"--env.rollout_server_url": url, "--env.total_steps": "-1", "--env.group_size": "4"}
    flags |= {"--openai.base_url": model.url, "--slurm": "false", "--env.use_wandb": "false"}
    flags |= {"--env.tokenizer_name": "byte", "--env.max_token_length": "20000"}
    arguments = [part for flag in flags.items() for part in flag]
    with trainer(url, batch_size=8, max_token_len=20000, num_steps=steps) as client:
        process = subprocess.Popen(
            [sys.executable, *command, "serve", *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        try:
            groups = [group for _ in range(steps) for group in pull(client)]
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()
            process.wait()
    assert len(groups) == 2 * steps and all(len(group) == 4 for group in groups)
    return groups


@pytest.mark.system
@pytest.mark.parametrize("name", ["sums", "pairs"])
def test_small_environment_written_for_atroposlib_runs(service, tmp_path, name):
    file = copy_with_new_imports(ROOT / "tests/compat/environment.py", tmp_path)
    with serving(Model(say=lambda messages, number: str(number % 19))) as model:
        groups = run_environment(f"{service.url}/runs/{name}", tmp_path, model, [str(file), name])
    for group in groups:
        assert all((row == tokens)[row != -100].all() for row, tokens in zip(group.masks, group.tokens))
        if name == "sums":
            assert set(group.scores.tolist()) == {0.0, 1.0} and group.inference_logprobs is None
        else:
            assert group.group_overrides.keys() == {"question"} and len(group.overrides) == 4
            assert {value for row in group.inference_logprobs for value in row.tolist()} == {1.0, -0.5}


@pytest.mark.compat
@pytest.mark.skipif(
    CHECKOUT is None, reason="RLFRAME_ATROPOS_CHECKOUT is not set to a checkout of the published environments"
)
def test_published_environment_of_atroposlib_runs(service, tmp_path):
    file = copy_with_new_imports(
        pathlib.Path(CHECKOUT, "environments/community/regex_generation/regex_env.py"), tmp_path
    )
    patterns = ["[a-z]+", "[0-9]+", "hello.*", ".*", "[A-Z]{3}"]

    def reply(prompt, number):
        return list(f"<think>hm</think><answer>{patterns[number % 5]}</answer>".encode())

    with serving(Model(reply=reply, policy_version=4)) as model:
        groups = run_environment(f"{service.url}/runs/regex", tmp_path, model, [str(file)])
    for group in groups:
        assert len(set(group.scores.tolist())) > 1 and group.policy_version == 4
        for tokens, mask in zip(group.tokens, group.masks):
            answer = bytes(tokens[mask != -100].tolist()).decode()
            assert answer.startswith("<think>hm</think><answer>")
            assert b"Strings that SHOULD match" in bytes(
                token for token in tokens[mask == -100].tolist() if token < 256
            )
