"""`rlframe serve policy` serves a model from a folder, or the newest checkpoint of a run."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from rlframe.agents import GRPO, GRPOConfig
from rlframe.errors import PeerError, UsageError
from rlframe.language.model import weights
from rlframe.learners import Learner, LearnerConfig
from rlframe.programs.options.make_experiment import make_experiment
from rlframe.programs.policies.served import policy_of_folder, policy_of_run
from rlframe.programs.run_dir.directory import RunDir
from tests.agents.token_batches import token_batch
from tests.language.server.serving import TINY, params_of
from tests.waiting import wait_until


def run_of(path, described):
    """Create a run directory without a checkpoint."""
    directory = RunDir(path)
    directory.create()
    directory.write_config(described, {})
    return directory


def equal(tree, other):
    return jax.tree.structure(tree) == jax.tree.structure(other) and all(
        np.array_equal(one, another) for one, another in zip(jax.tree.leaves(tree), jax.tree.leaves(other))
    )


def test_newest_checkpoint_of_a_run_is_served(tmp_path):
    cfg = GRPOConfig(model=TINY, max_tokens=16, batch_size=4, learning_rate=1e-2)
    directory = run_of(tmp_path / "run", make_experiment("grpo", preset="none", agent_config=cfg))
    served = policy_of_run(directory.path, None, None)
    assert (served.model_config, served.tokenizer, served.params) == (TINY, "byte", None)
    with pytest.raises(PeerError, match="There is no checkpoint"):
        served.learner.get_params(-1)
    learner = Learner(LearnerConfig(checkpoint_dir=str(directory.checkpoints), seed=3), GRPO(cfg), None)
    try:
        learner.save()
        version, params = served.learner.get_params(-1)
        assert version == learner.params_version and equal(params, learner.get_params()[1])
        assert served.learner.get_params(version) == (version, None)
        learner.step(token_batch(TINY.vocab_size, lengths=[9, 4, 6, 7], group=[0, 0, 1, 1]))
        learner.save()
        wait_until(lambda: served.learner.get_params(version)[0] > version, "the next checkpoint was not found")
        version, newer = served.learner.get_params(-1)
        assert version == learner.params_version and equal(newer, learner.get_params()[1]) and not equal(newer, params)
    finally:
        learner.close()


def test_run_without_language_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match="does not train a language model: its agent is ppo"):
        policy_of_run(run_of(tmp_path / "run", make_experiment("ppo")).path, None, None)


def test_tokenizer_in_the_model_folder_is_used(tmp_path):
    from rlframe.language.model.tokenizers import ByteTokenizer

    weights.save(tmp_path, TINY, params_of(0))
    served = policy_of_folder(str(tmp_path), None, None, None)
    assert served.tokenizer == "byte" and served.learner is None and equal(served.params, params_of(0))
    assert served.model_config.hidden_size == TINY.hidden_size
    ByteTokenizer().save(tmp_path)
    assert policy_of_folder(str(tmp_path), None, None, None).tokenizer == str(tmp_path)
    assert policy_of_folder(str(tmp_path), "byte", None, "bfloat16").model_config.dtype == "bfloat16"
