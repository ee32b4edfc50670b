"""In a Jupyter notebook, `rlframe.train` shows its progress in one line, which it overwrites."""

from __future__ import annotations

import pytest

from tests.extras import import_or_skip

CELL = """
import rlframe
result = rlframe.train("ppo", "gymnasium:CartPole-v1", run_dir="run", steps=4_000, num_envs=4, preset="none",
                       unroll_length=32, num_minibatches=4, eval_episodes=1)
"""


def shown(text: str) -> list[str]:
    """Return the lines that a notebook displays for `text`. Text after a carriage return overwrites its line."""
    lines = []
    for line in text.split("\n"):
        on_top = ""
        for part in line.split("\r"):
            on_top = part + on_top[len(part) :]
        lines.append(on_top.rstrip())
    return lines


@pytest.mark.system
def test_progress_in_a_notebook_overwrites_one_line(tmp_path):
    how = "pip install 'rlframe[test]'"
    import_or_skip("ipykernel", how)
    nbclient, nbformat = import_or_skip("nbclient", how), import_or_skip("nbformat", how)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (CELL, "result")])
    client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    text = "".join(each.text for each in notebook.cells[0].outputs if each.output_type == "stream")
    assert text.count("\r") >= 2, "the progress should be drawn at least twice"
    devices, backend, updates, *lines = [line for line in shown(text) if line]
    assert devices.startswith("Devices: ")
    assert backend.startswith("The environment gymnasium:CartPole-v1 is made by Gymnasium")
    assert updates.startswith("About 31 updates of 4 items each")
    assert len(lines) == 1 and lines[0].startswith("ppo on gymnasium:CartPole-v1: steps 4,"), lines
    assert "return" in lines[0] and "0:00 left" in lines[0]
    assert "return_mean" in notebook.cells[1].outputs[0].data["text/plain"]
