"""The Inferencer: a copy of the parameters, and one jitted call from timesteps to actions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from rlframe import compilation
from rlframe.errors import UsageError
from rlframe.packing import Packing
from rlframe.types import AgentOutput, AgentState, TimeStep, Tree


@dataclasses.dataclass(frozen=True)
class InferencerConfig:
    """How an Inferencer acts and how often it asks for newer parameters."""

    sync_interval: int = 1  # inference calls between two looks at the learner's parameters
    greedy: bool = False  # True: `agent.eval_step` in place of `agent.actor_step`
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sync_interval < 1:
            raise UsageError(f"InferencerConfig.sync_interval must be at least 1 call, got {self.sync_interval}.")


class Inferencer:
    """Answers batches of timesteps with an agent's actions, by the learner's newest parameters.

    Args:
        cfg: see `InferencerConfig`.
        agent: the `Agent` that acts.
        learner: anything with `get_params(known_version) -> (version, tree or None)`.
    """

    def __init__(self, cfg: InferencerConfig, agent: Any, learner: Any) -> None:
        self._cfg = cfg
        self._agent = agent
        self._learner = learner
        self._rng = jax.random.PRNGKey(cfg.seed)
        self._calls = 0
        self._version = -1
        self._params: list[jax.Array] = []
        self._params_packing: Packing | None = None
        self._output_packings: dict[int, Packing] = {}  # by batch size
        # A jitted identity moves arrays to the device in a tenth of the time that jax.device_put takes.
        self._upload = jax.jit(lambda arrays: arrays)
        self._act = compilation.jit(self._packed_step, differentiates=False)

    @property
    def agent(self) -> Any:
        """The agent that acts."""
        return self._agent

    @property
    def params_version(self) -> int:
        """The version that acted in the last call; -1 before the first."""
        return self._version

    def initial_state(self, batch_size: int) -> AgentState:
        """The agent's recurrent state at FIRST, as numpy: a tree of [batch_size, ...]."""
        return jax.tree.map(np.asarray, self._agent.initial_state(batch_size))

    def inference(self, env_ids: np.ndarray, timestep: TimeStep, state: AgentState) -> tuple[AgentOutput, AgentState]:
        """Acts on a batch of timesteps.

        Args:
            env_ids: [B] int64, the global ids of the environments.
            timestep: [B, ...], see `rlframe.types`.
            state: the recurrent state that the call before gave for these environments, [B, ...].

        Returns:
            (output, state), all numpy; `output.params_version` is the version that acted.

        Raises:
            UsageError: an observation does not match the agent's spec (checked when a shape is new).
        """
        del env_ids  # the state travels with the call, so any inferencer can answer for any environment
        if self._calls % self._cfg.sync_interval == 0:
            self.refresh()
        self._calls += 1
        packed = self._act(self._rng, np.uint32(self._calls), self._params, timestep, state)
        output, state = self._output_packings[len(timestep.step_type)].unpack_numpy(packed)
        return AgentOutput(output.action, output.extras, self._version), state

    def refresh(self) -> None:
        """Fetches the learner's parameters if there is a newer version."""
        version, params = self._learner.get_params(self._version)
        if params is not None:
            self._take(version, params)

    def get_state(self) -> dict[str, Any]:
        """All that a resumed Inferencer needs to go on as if it had not stopped (numpy and ints)."""
        # Between two syncs it acts by parameters that the learner no longer has.
        packing = self._params_packing if self._cfg.sync_interval > 1 else None
        params = packing.unpack_numpy(self._params) if packing is not None else None
        return {"calls": self._calls, "version": self._version, "params": params}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over what `get_state` gave."""
        self._calls = state["calls"]
        if state["params"] is not None:
            self._take(state["version"], state["params"])

    def _take(self, version: int, params: Tree) -> None:
        if self._params_packing is None:
            self._params_packing = Packing(params)
        self._params = self._upload(self._params_packing.pack_numpy(params))
        self._version = version

    def _packed_step(
        self, rng: jax.Array, call: jax.Array, packed: list[jax.Array], timestep: TimeStep, state: AgentState
    ) -> list[jax.Array]:
        # Runs once per new shape, when it is traced: the checks cost nothing afterwards.
        self._agent.check_observation(timestep.observation)
        step = self._agent.eval_step if self._cfg.greedy else self._agent.actor_step
        assert self._params_packing is not None
        params = self._params_packing.unpack(packed)
        output, state = step(jax.random.fold_in(rng, call), params, timestep, state)
        answer = (output._replace(params_version=None), state)
        packing = self._output_packings[len(timestep.step_type)] = Packing(answer)
        return packing.pack(answer)
