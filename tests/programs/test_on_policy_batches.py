"""One actor and an on-policy learner wait for each other, so a program has the same batches as a single process."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from rlframe.agents.networks import MLPConfig
from rlframe.programs import make_experiment, run_experiment
from rlframe.programs.options.object_names import load_object

RECORDING_PPO = """
import jax
import numpy as np
from rlframe.agents import PPO

batches = []

class Recording(PPO):
    jit_learner_step = False

    def learner_step(self, params, learner_state, batch):
        batches.append(jax.tree.map(np.array, batch.data))
        return super().learner_step(params, learner_state, batch)
"""


def batches_of(tmp_path, topology: str, **fields: Any) -> list[Any]:
    # Write one module per topology, so that each topology has a separate list of batches.
    path = tmp_path / f"{topology}.py"
    path.write_text(RECORDING_PPO)
    values = {"num_envs": 4, "env_type": "loop", "eval_episodes": 2, "steps": 1_200, "unroll_length": 16}
    values |= {"num_epochs": 2, "num_minibatches": 2, "network": "mlp", "network_config": MLPConfig((16,)), "seed": 5}
    experiment = make_experiment(f"{path}:Recording", topology=topology, **values, **fields)
    run_experiment(experiment, run_dir=tmp_path / topology)
    return load_object(f"{path}:batches", "agent")


@pytest.mark.system
def test_one_actor_on_the_threads_engine_gives_the_same_batches_as_a_single_process(tmp_path):
    expected_batches = batches_of(tmp_path, "single_process")
    batches = batches_of(tmp_path, "heavy_env", engine="threads", num_actors=1)
    assert len(expected_batches) >= 18 and len(batches) >= 18
    for batch, other in zip(expected_batches, batches):
        leaves, expected = jax.tree.leaves_with_path(other), jax.tree.leaves(batch)
        assert len(leaves) == len(expected)
        for (path, leaf), want in zip(leaves, expected):
            np.testing.assert_array_equal(leaf, want, err_msg=jax.tree_util.keystr(path))
