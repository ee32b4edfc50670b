"""An agent whose recurrent state counts the steps of the episode, so that tests detect a wrong recurrent state."""

from __future__ import annotations

import jax
import numpy as np

from rlframe.agents import IMPALA
from rlframe.types import FIRST


class Counting(IMPALA):
    """An IMPALA agent with a step counter in its recurrent state. The learner raises if the counter is wrong."""

    jit_learner_step = False

    def __init__(self, cfg, observation_spec, action_spec, net_factory=None):
        super().__init__(cfg, observation_spec, action_spec, net_factory)
        self._learn = jax.jit(super().learner_step)

    def initial_state(self, batch_size):
        return {"core": super().initial_state(batch_size), "count": np.zeros(batch_size, np.int32)}

    def actor_step(self, rng, params, timestep, state):
        output, core = super().actor_step(rng, params, timestep, state["core"])
        output.extras["count"] = state["count"]
        return output, {"core": core, "count": state["count"] + 1}

    def eval_step(self, rng, params, timestep, state):
        output, core = super().eval_step(rng, params, timestep, state["core"])
        return output, {**state, "core": core}

    def learner_step(self, params, learner_state, batch):
        data = batch.data
        count, extras = data.agent_state["count"], dict(data.extras)
        for t, received in enumerate(np.asarray(extras.pop("count")).T):
            count = np.where(data.step_type[:, t] == FIRST, 0, count)
            np.testing.assert_array_equal(received, count)
            count = count + 1
        data = data._replace(agent_state=data.agent_state["core"], extras=extras)
        return self._learn(params, learner_state, batch._replace(data=data))
