"""Check the words, options and code of the pages in docs/. System tests run the code of each page."""

from __future__ import annotations

import importlib
import inspect
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests import test_inventory

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))

import pages

RLFRAME = [sys.executable, "-m", "rlframe"]
PAGES = [str(page.relative_to(ROOT)) for page in pages.pages()]
# Pages with code that is run here. The build of the site runs the notebooks (docs/learn).
WITH_CODE = [
    name
    for name in PAGES
    if name != "README.md" and any(not block.reason and not block.is_cell for block in pages.blocks(ROOT / name))
]
# Options of other programs that the pages mention.
FOREIGN = {
    "--cleanrl", "--env-id", "--host", "--num-steps", "--track", "--total-timesteps", "--capture-video", "--save-model",
    "--array", "--job-name", "--nodes", "--cpus-per-task", "--requeue", "--no-wait", "--submission-id", "--working-dir",
    "--entrypoint-num-cpus", "--entrypoint-num-gpus", "--runtime-env", "--openai", "--env", "--map-root-user", "--net",
    "--xla_force_host_platform_device_count", "--node-manager-port", "--object-manager-port", "--min-worker-port",
    "--runtime-env-agent-port", "--max-worker-port", "--init", "--help", "--version", "--xla", "--options",
    "--name-of-option", "--peers-python", "--logdir",
}  # fmt: skip


def test_pages_have_at_most_30000_words_and_the_readme_80_lines():
    assert sum(map(pages.count_words, pages.pages())) <= pages.MOST_WORDS
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80


def test_every_option_on_a_page_exists():
    known = {flag for lines in test_inventory.written("command").values() for line in lines for flag in _flags(line)}
    unknown = []
    for page in pages.pages():
        text = re.sub(r"<!-- not run: .*? -->\n```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", text):
            if flag not in known | FOREIGN and flag.replace("--no-", "--") not in known:
                unknown.append(f"{page.relative_to(ROOT)}: {flag}")
    assert unknown == []


def _flags(line: str) -> list[str]:
    return re.findall(r"--[a-z][\w-]*", line)


def test_every_public_name_has_a_docstring():
    missing = []
    for package in test_inventory.written("name"):
        if not package.startswith("rlframe"):
            continue
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", []):
            value = getattr(module, name)
            is_ours = (getattr(value, "__module__", None) or "").startswith("rlframe")
            if is_ours and callable(value) and not inspect.getdoc(value):
                missing.append(f"{package}.{name}")
    assert missing == []


def test_code_that_is_not_run_has_a_reason():
    assert all(len(block.reason) > 5 for _, block in pages.not_run())


@pytest.mark.system
@pytest.mark.parametrize("name", WITH_CODE)
def test_code_of_a_page_runs(name, tmp_path):
    script = ""
    for block in pages.blocks(ROOT / name):
        if block.reason or block.is_cell:
            continue
        if named := re.match(r"# (\w+\.py)\n", block.code):
            (tmp_path / named[1]).write_text(block.code)
        elif block.language == "python":
            script += block.code
        else:
            for line in re.findall(r"^\$ rlframe ((?:.*\\\n)*.*)", block.code, re.MULTILINE):
                _run([*RLFRAME, *shlex.split(line.replace("\\\n", " "), comments=True)], tmp_path)
    if script:
        _run([sys.executable, "-c", script], tmp_path)


def _run(command: list[str], folder: pathlib.Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280.0)
    assert done.returncode == 0 and "Traceback" not in done.stderr, f"{command}\n{done.stdout}\n{done.stderr}"
