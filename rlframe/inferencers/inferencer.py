"""An Inferencer fetches parameters and answers calls, also as a service. Its `JittedPolicy` makes the jitted call."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from typing import Any

import jax
import numpy as np

from rlframe import compilation, handles
from rlframe.agents.base import Agent
from rlframe.agents.trees import zero_timestep
from rlframe.errors import UnavailableError, UsageError, check_above, check_at_least
from rlframe.inferencers.batching import TIMEOUT, Batcher
from rlframe.inferencers.shared_calls import CallMemoryRegistry
from rlframe.interprocess.heartbeat import COMPUTING
from rlframe.interprocess.memory import MemoryName
from rlframe.params.packing import ByteLayout, PackedParams, Packing
from rlframe.params.reader import ParamSource, Refresher
from rlframe.sharding import local_device
from rlframe.types import ENVS_PER_RANK, AgentOutput, AgentSpecs, AgentState, TimeStep, Tree, call_number

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class InferencerConfig:
    """Options of an Inferencer: how it acts, and how often it fetches newer parameters."""

    sync_interval: int = 1  # inference calls between two checks for newer parameters
    greedy: bool = False  # True: act with `agent.eval_step`, not `agent.actor_step`
    seed: int = 0
    device: int | None = None  # id of the device that acts; None means the device of the parameters
    pack_requests: bool | None = None  # copy each request to the device as one array; None: on accelerators
    learner_deadline: float = handles.DEADLINE  # maximum seconds without an answer from a remote learner
    # Options of a service (`run`), which an inline Inferencer ignores:
    refresh_interval: float = 0.02  # seconds between two checks for newer parameters
    max_batch: int = 256  # maximum number of rows in a batch; a larger request gets its own batch
    max_wait: float = 0.0  # seconds to wait for more requests; 0 was fastest in benchmarks

    def __post_init__(self) -> None:
        check_at_least(self, 1, "sync_interval", "max_batch")
        check_at_least(self, 0, "max_wait")
        check_above(self, 0, "refresh_interval", "learner_deadline")


class JittedPolicy:
    """An agent and its parameters on a device: one jitted call acts on a batch of timesteps. Any thread can call it.

    The random numbers of a call depend on the seed, on the number of earlier calls, and on the rank of the actor.

    Args:
        cfg: see `InferencerConfig`.
        agent: the `Agent` that acts.

    Attributes:
        active: (version, packed parameters) in use. The version is -1 before the first parameters arrive. This is one
            tuple, so that another thread always sees a version with its parameters.
        calls: number of calls so far.
    """

    def __init__(self, cfg: InferencerConfig, agent: Agent) -> None:
        self._cfg, self._agent = cfg, agent
        self.active: tuple[int, list[jax.Array]] = (-1, [])
        self.calls = 0
        self._counting = threading.Lock()  # guards `calls`, so that no two calls draw the same random numbers
        self._params_packing: Packing | None = None
        self._layouts: dict[int, ByteLayout] = {}  # number of rows -> layout of packed requests
        self._output_packings: dict[int, Packing] = {}  # number of rows -> packing; each tracing adds an entry

    def act(self, env_ids: np.ndarray, timestep: TimeStep, state: AgentState) -> tuple[AgentOutput, AgentState]:
        """See `Inferencer.inference`."""
        with self._counting:
            self.calls += 1
            calls = self.calls
        call = call_number(int(env_ids[0]) // ENVS_PER_RANK, calls)
        version, params = self.active
        with COMPUTING:
            packed = self.step(self.rng, params, self.request(call, timestep, state))
            action, extras, state = self._output_packings[len(timestep.step_type)].unpack_numpy(packed)
        return AgentOutput(action, extras, version), state

    def compile_ahead(self, rows: int) -> None:
        """Compile the jitted call for `rows` environments in another thread. It needs parameters."""
        timestep, state = zero_timestep(self._agent.observation_spec, rows), self._agent.initial_state(rows)
        request = self.request(np.uint32(0), timestep, jax.tree.map(np.asarray, state))
        self.step.compile_ahead(self.rng, self.active[1], request)

    def take(self, version: int, packed: PackedParams) -> None:
        """Use these parameters from now on."""
        if self._params_packing is None:
            self._params_packing = packed.packing
        arrays = packed.arrays
        # A learner in this process has its arrays on a device already.
        if self._device is not None or any(isinstance(array, np.ndarray) for array in arrays):
            arrays = self._upload(arrays)
        self.active = version, arrays

    def params(self) -> Tree | None:
        """Return the parameters in use as numpy arrays, or None before the first ones arrive."""
        return None if self._params_packing is None else self._params_packing.unpack_numpy(self.active[1])

    @property
    def compilations(self) -> int:
        """The number of compilations so far, one for each number of rows."""
        return len(self._output_packings)

    # The cached properties are created at their first use, in the process that uses them.

    @functools.cached_property
    def rng(self) -> jax.Array:
        """The key from which each call derives its own."""
        return jax.device_put(jax.random.PRNGKey(self._cfg.seed), self._device)

    @functools.cached_property
    def step(self) -> compilation.jit:
        """The jitted call: (rng, packed parameters, `request`) -> packed output and state."""

        def step(rng: jax.Array, packed: list[jax.Array], request: Any) -> list[jax.Array]:
            # Python runs this function only while JAX traces it, once for each number of rows. Later calls skip checks.
            if not isinstance(request, tuple):
                # No two numbers of rows have the same size.
                layout = next(each for each in self._layouts.values() if each.size == request.size)
                request = layout.unpack_jax(request)
            call, timestep, state = request
            self._agent.check_observation(timestep.observation)
            act = self._agent.eval_step if self._cfg.greedy else self._agent.actor_step
            assert self._params_packing is not None
            params = self._params_packing.unpack_jax(packed)
            output, state = act(jax.random.fold_in(rng, call), params, timestep, state)
            answer = (output.action, output.extras, state)
            packing = self._output_packings[len(timestep.step_type)] = Packing(answer)
            return packing.pack_jax(answer)

        return compilation.jit(step, differentiates=False)

    def request(self, call: np.uint32, timestep: TimeStep, state: AgentState) -> Any:
        """Return the last argument of `step`. On an accelerator, copy it as one array, because each copy takes time."""
        request = (call, timestep, state)
        if not self._packs_requests:
            return request
        layout = self._layouts.get(len(timestep.step_type))
        if layout is None:
            layout = self._layouts[len(timestep.step_type)] = ByteLayout(request)
        return jax.device_put(layout.pack(request), self._device)

    @functools.cached_property
    def _packs_requests(self) -> bool:
        packs = self._cfg.pack_requests
        return jax.default_backend() != "cpu" if packs is None else packs

    @functools.cached_property
    def _device(self) -> jax.Device | None:
        number = self._cfg.device
        return None if number is None else local_device("An actor (actor_device_ids)", number)

    @functools.cached_property
    def _upload(self) -> Any:
        if self._device is not None:
            return functools.partial(jax.device_put, device=self._device)
        # A jitted identity function copies arrays to the device ten times faster than jax.device_put.
        return jax.jit(lambda arrays: arrays)


class Inferencer:
    """Returns an agent's actions for batches of timesteps, with the learner's newest parameters.

    An inline Inferencer runs in the thread of its caller, so its results are reproducible. While `run()` is active, the
    Inferencer is a service: one jitted call answers simultaneous calls, and the thread of `run` fetches parameters.

    A call starts one of these three methods. An indented name is called by the method above it:

            inference(env_ids, timestep, state)
              refresh                           # every `sync_interval` calls
              JittedPolicy.act                  # draws the call's random numbers, and unpacks the jitted call's result
                Agent.actor_step                # in a jitted function, compiled once for each number of rows

            answer_inference                    # from another process: calls `inference`; returns a refusal as a string
            shared_inference                    # from another process of the machine: the arrays are in the client's
              inference                         #   memory, which `share_calls` maps (shared_calls.py)
                Batcher                         # if this is a service: joins simultaneous calls
                  _act_for_batch                # stops the service if a batch fails, and logs compilations
                    JittedPolicy.act

    An Inferencer can be passed to an Actor in another process, because only its constructor's arguments are pickled.

    Args:
        cfg: see `InferencerConfig`.
        agent: the `Agent` that acts.
        learner: a `ParamSource` (a Learner, or a policy of a param store), or a handle to such a node. A handle is
            resolved at the first call.

    Attributes:
        agent: the agent that acts.

    Raises:
        UsageError: `learner` is a Launchpad node instead of its handle.
    """

    def __init__(self, cfg: InferencerConfig, agent: Agent, learner: ParamSource | Any) -> None:
        # Check now, where the mistake is. The Inferencer may be used in another process.
        handles.refuse_nodes(learner, "as the learner")
        self._cfg, self.agent, self._learner_or_handle = cfg, agent, learner
        self._policy = JittedPolicy(cfg, agent)
        self._lock = threading.Lock()  # a call of an inline Inferencer acquires this lock
        self._batcher: Batcher | None = None  # None until `run` is called
        self._failure: BaseException | None = None
        self._shared_calls = CallMemoryRegistry()
        self._has_params, self._stop = threading.Event(), threading.Event()
        self._new_version = threading.Condition()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._cfg, self.agent, self._learner_or_handle)

    @functools.cached_property
    def _refresher(self) -> Refresher:  # created at its first use, in the process that uses it
        learner, deadline = self._learner_or_handle, self._cfg.learner_deadline
        return Refresher(learner, lambda: self.params_version, self._take, deadline, self._stop)

    def specs(self) -> AgentSpecs:
        """Return (replay_spec, step_spec) of the agent. An Actor needs them if its replay is on another node."""
        return AgentSpecs(self.agent.replay_spec, self.agent.step_spec)

    @property
    def params_version(self) -> int:
        """Version of the parameters in use; -1 before the first parameters arrive."""
        return self._policy.active[0]

    def initial_state(self, batch_size: int) -> AgentState:
        """Return the agent's recurrent state for a FIRST timestep, as numpy arrays: a tree of [batch_size, ...]."""
        return jax.tree.map(np.asarray, self.agent.initial_state(batch_size))

    def inference(
        self, env_ids: np.ndarray, timestep: TimeStep, state: AgentState = ()
    ) -> tuple[AgentOutput, AgentState]:
        """Act on a batch of timesteps. Any thread may call it, and any call may be repeated.

        Args:
            env_ids: [B] int64, global environment ids. The rank in the first id selects the stream of random numbers.
            timestep: [B, ...], see `rlframe.types`.
            state: [B, ...], the recurrent state that the previous call returned for these environments. Agents without
                recurrent state do not need it. Since each call passes the state, any inferencer can answer for any
                environment.

        Returns:
            (output, state), all numpy. `output.params_version` is the version of the parameters that chose the actions.

        Raises:
            UsageError: an observation does not match the agent's spec. This is checked for each new shape.
            PeerError: the learner is in another process, and did not answer for `learner_deadline`.
            UnavailableError: a service has no parameters yet, is overloaded, or is stopping.
        """
        if self._batcher is not None:
            if not self._has_params.wait(TIMEOUT):
                raise UnavailableError("The inference service has no parameters yet: its learner has not answered.")
            return self._batcher(env_ids, timestep, state)
        with self._lock:
            if self._policy.calls % self._cfg.sync_interval == 0:
                self.refresh()
            return self._policy.act(env_ids, timestep, state)

    def compile_ahead(self, rows: int) -> None:
        """Fetch the parameters, and compile the jitted call for `rows` environments in another thread.

        The next call of `inference` waits for this thread.
        """
        self.refresh()
        self._policy.compile_ahead(rows)

    def is_ready(self, timeout: float) -> bool:
        """Wait for the first parameters, for up to `timeout` seconds (at most 1). Return True if they have arrived."""
        return self._batcher is None or self._has_params.wait(min(timeout, 1.0))

    def answer_inference(
        self, env_ids: np.ndarray, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState] | str:
        """Answer a call of `inference` from another process. Return the message of an UnavailableError as a string.

        The caller repeats its call if it gets a string. An exception would make the server print a traceback, although
        such a refusal is normal.
        """
        try:
            return self.inference(env_ids, timestep, state)
        except UnavailableError as error:
            return str(error)

    def share_calls(self, name: MemoryName, capacity: int, request: Tree, answer: Tree) -> bool:
        """Map a client's memory (`CallMemory`) for `shared_inference`. Return False if that is not possible."""
        return self._shared_calls.share(name, capacity, request, answer)

    def shared_inference(self, token: int, slot: int, rows: int) -> int | str:
        """Read the arguments of `inference` from a slot of a client's memory, and write the answer to this slot.

        Returns:
            The version of the parameters that chose the actions, or a string with the reason why there is no answer.
            After a restart of this process, the client must call `share_calls` again.
        """
        try:
            call = self._shared_calls.slot(token, slot, rows)
            return call.write(self.inference(*call.request()))
        except UnavailableError as error:
            return str(error)

    def refresh(self) -> None:
        """Fetch the learner's parameters if there is a newer version."""
        self._refresher.refresh()

    def wait_for_version(self, known_version: int, timeout: float) -> int:
        """Wait until the version in use is above `known_version`, for up to `timeout` seconds (at most 1).

        Return the version in use.

        Raises:
            PeerError: the learner is in another process, and did not answer for `learner_deadline`.
        """
        if self._batcher is not None:
            with self._new_version:
                self._new_version.wait_for(
                    lambda: self.params_version > known_version or self._stop.is_set(), min(timeout, 1.0)
                )
        elif self.params_version <= known_version:
            self._refresher.wait_for_version(known_version, timeout)
            with self._lock:
                self.refresh()
        return self.params_version

    def run(self) -> None:
        """Run as a service until `stop()` is called, or until the program ends.

        Parameters are fetched every `refresh_interval` seconds. For an on-policy agent they are fetched as soon as
        there is a new version, because its actors wait for them. While the learner does not answer, the newest version
        stays in use.

        Raises:
            PeerError: the learner did not answer within `learner_deadline`, and no parameters have arrived before.
        """
        if self._batcher is not None:
            raise UsageError("This Inferencer's run() was already called. Make another Inferencer.")
        self._batcher = Batcher(self.agent, self._act_for_batch, self._cfg.max_batch, self._cfg.max_wait)
        try:
            with handles.stop_with_program(self.stop):
                is_on_policy = self.agent.replay_spec.max_staleness is not None
                self._refresher.follow(self._cfg.refresh_interval, waits=is_on_policy)
        finally:
            self.stop()
            self._batcher.stop("The inference service has stopped.")
            self._has_params.set()  # wakes calls that wait for parameters; then the Batcher refuses them
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End `run()`. Waiting calls get an UnavailableError at once. Any thread may call it."""
        self._stop.set()
        with self._new_version:
            self._new_version.notify_all()

    def stats(self) -> dict[str, int]:
        """Return counters: compilations and params_version.

        A service also returns requests, calls, rows and padding_rows.
        """
        counts = self._batcher.counts if self._batcher is not None else {}
        return {**counts, "compilations": self._policy.compilations, "params_version": self.params_version}

    def get_state(self) -> dict[str, Any]:
        """Return numpy arrays and ints from which a resumed Inferencer continues exactly."""
        # With a longer interval, the learner may have replaced the parameters that are in use, so save them.
        params = self._policy.params() if self._cfg.sync_interval > 1 else None
        return {"calls": self._policy.calls, "version": self.params_version, "params": params}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._policy.calls = state["calls"]
        if state["params"] is not None:
            self._take(state["version"], PackedParams.of(state["params"]))

    def _take(self, version: int, packed: PackedParams) -> None:
        self._policy.take(version, packed)
        with self._new_version:
            self._new_version.notify_all()
        self._has_params.set()

    def _act_for_batch(self, env_ids: np.ndarray, timestep: TimeStep, state: AgentState) -> Any:
        known, began = self._policy.compilations, time.perf_counter()
        try:
            answer = self._policy.act(env_ids, timestep, state)
        except BaseException as error:  # end `run` with this error: the shapes were checked, so no request is the cause
            self._failure = error
            self.stop()
            raise
        if self._policy.compilations > known:
            rows = len(timestep.step_type)
            _log.info("Compiled inference of %d rows in %.1f s.", rows, time.perf_counter() - began)
        return answer
