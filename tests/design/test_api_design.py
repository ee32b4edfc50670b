"""The design document of the API: the signatures of its classes, and its four example programs.

The programs pass real arguments where the document has only a sketch (`Agent()`, `max_iters`). tests/design/README.md
lists the intended differences. For these, a call in the document's form raises an error that contains our form.
"""

from __future__ import annotations

import functools
import inspect
import os
import pathlib
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

import rlframe
from rlframe import (
    Actor,
    Agent,
    AsyncEnv,
    EnvServer,
    Inferencer,
    InferencerConfig,
    Learner,
    LearnerConfig,
    ReplayBuffer,
    SyncEnv,
)
from rlframe.agents import IMPALA, PPO, IMPALAConfig, PPOConfig
from rlframe.engines.supervision.node_main import public_methods
from rlframe.envs import as_pool
from rlframe.envs.envpool import EnvPoolAdapter
from rlframe.errors import UsageError
from rlframe.handles import Remote
from rlframe.learners import DataConfig
from rlframe.types import AgentOutput, TimeStep
from tests.extras import needs
from tests.in_process import InProcess

# The names of each method's parameters, in the same order as in the design document.
SIGNATURES = {
    "SyncEnv.__init__": "name_or_pybuilder size type",
    "SyncEnv.step": "actions",
    "AsyncEnv.__init__": "name_or_pybuilder size wait_num type",
    "AsyncEnv.recv": "",
    "AsyncEnv.send": "env_ids actions",
    "Agent.__init__": "cfg observation_spec action_spec net_factory policy_factory",
    "Agent.initial_state": "batch_size",
    "Agent.initial_params": "rng",
    "Agent.actor_step": "rng params timestep state",
    "Agent.initial_learner_state": "params",
    "Agent.learner_step": "params learner_state batch",
    "Agent.compute_gradients": "params learner_state batch",
    "Agent.apply_gradients": "params grads learner_state",
    "Agent.update_learner_state": "params opt_state learner_state",
    "Actor.__init__": "env_builder inferencer replay_buffer rank",
    "Actor.step": "",
    "Actor.run": "",
    "Learner.__init__": "cfg agent replay_buffer",
    "Learner.get_params": "",
    "Learner.step": "batch",
    "Learner.run": "",
    "Inferencer.__init__": "cfg agent learner",
    "Inferencer.inference": "env_ids timestep",
    "ReplayBuffer.add": "env_ids",
    "ReplayBuffer.sample": "",
    "ReplayBuffer.make_dataset": "",
}


@pytest.mark.parametrize("method", SIGNATURES)
def test_parameter_names_and_their_order_match_the_design_document(method):
    name, _, attribute = method.partition(".")
    signature = inspect.signature(getattr(getattr(rlframe, name), attribute))
    parameters = list(signature.parameters.values())[1:]
    wanted = SIGNATURES[method].split()
    assert [parameter.name for parameter in parameters[: len(wanted)]] == wanted
    further = [parameter for parameter in parameters[len(wanted) :] if parameter.default is parameter.empty]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    assert method == "ReplayBuffer.add" or not [parameter for parameter in further if parameter.kind not in kinds]


def test_sync_env_accepts_a_builder_and_async_env_accepts_a_name():
    import gymnasium

    def pybuilder():
        return gymnasium.make("CartPole-v1")

    env = SyncEnv(pybuilder, 3, "thread")
    assert env.is_sync and isinstance(env.reset(), TimeStep)
    assert env.step(np.zeros(3, np.int32)).observation.shape == (3, 4)
    env.close()
    env = AsyncEnv("CartPole-v1", 4, 2, "envpool")
    assert not env.is_sync
    env_ids, timestep = env.recv()
    assert env_ids.shape == (2,) and timestep.observation.shape == (2, 4)
    env.send(env_ids, np.zeros(2, np.int32))
    env.close()


def test_agent_stores_no_parameters_and_learner_step_calls_three_methods():
    env = SyncEnv("CartPole-v1", 1, "envpool")
    agent = PPO(PPOConfig(), env.observation_spec, env.action_spec)
    assert not hasattr(agent, "params") and "params" not in vars(agent)
    source = inspect.getsource(Agent.learner_step)
    parts = ["self.compute_gradients(", "self.apply_gradients(", "self.update_learner_state("]
    assert sorted(map(source.index, parts)) == [source.index(part) for part in parts] and -1 not in map(
        source.find, parts
    )
    env.close()


def refused(code, match):
    with pytest.raises(UsageError, match=match):
        exec(code, {"Agent": Agent, "PPO": PPO, "PPOConfig": PPOConfig})


@pytest.mark.parametrize(
    ("literal", "ours"),
    [
        ("def initial_learnerstate(self, params): ...", r"initial_learner_state\(params\)"),
        (
            "def update_learnerstate(self, params, opt_state, learner_state): ...",
            r"update_learner_state\(params, opt_state, learner_state\)",
        ),
        ("def compute_gradients(self, params, batch): ...", r"called with \(params, learner_state, batch\)"),
    ],
)
def test_error_for_a_method_name_in_the_design_document_contains_our_name(literal, ours):
    refused(f"class Mine(Agent):\n    {literal}", ours)


@pytest.mark.parametrize(("literal", "ours"), [("obs_spec", "observation_spec"), ("policy_factor", "policy_factory")])
def test_error_for_an_argument_name_in_the_design_document_contains_our_name(literal, ours):
    refused(f"PPO(PPOConfig(), {literal}=None)", f"no argument {literal}. Did you mean '{ours}'")


def test_agent_subclass_can_override_methods_with_the_signatures_in_the_design_document():
    class Mine(Agent):
        def initial_state(self, batch_size): ...
        def initial_params(self, rng_key): ...
        def actor_step(self, rng_key, params, timestep, state): ...
        def learner_step(self, params, learner_state, batch): ...


def an_env(seed=0):
    import gymnasium

    return gymnasium.make("CartPole-v1")


def a_pool(type, seed=0):
    return SyncEnv("gymnasium:CartPole-v1", 4, type, seed=seed)


class Rows(list):
    def write(self, step, values):
        self.append((step, values))


@pytest.mark.parametrize(
    "type",
    [pytest.param(one, marks=pytest.mark.system) for one in ("single env", "thread", "process")],
)
def test_single_process_program_in_the_design_document_runs(type):
    env_builder = an_env if type == "single env" else functools.partial(a_pool, type)

    env = as_pool(env_builder)
    agent = PPO(PPOConfig(unroll_length=16, num_minibatches=4), env.observation_spec, env.action_spec)
    env.close()
    learner_cfg, inferencer_cfg = LearnerConfig(), InferencerConfig(sync_interval=1)
    max_iters, env_steps = 3, 16

    replay_buffer = ReplayBuffer(agent)
    learner = Learner(learner_cfg, agent, replay_buffer)
    inferencer = Inferencer(inferencer_cfg, agent, learner)
    actor = Actor(env_builder, inferencer, replay_buffer)
    for _ in range(max_iters):
        for _ in range(env_steps):
            actor.step()
        batch = replay_buffer.sample()
        learner.step(batch)

    assert learner.learner_steps == max_iters
    version, params = learner.get_params()
    assert version == max_iters + 1 and isinstance(params, dict)
    output, state = inferencer.inference(np.array([0]), TimeStep(*(leaf[:1] for leaf in actor_timestep(env_builder))))
    assert isinstance(output, AgentOutput) and output.params_version == version and state == ()
    actor.close()
    learner.close()


def actor_timestep(env_builder):
    env = as_pool(env_builder)
    timestep = env.reset()
    env.close()
    return timestep


def test_actor_and_learner_run_as_services_with_a_logger_and_a_data_config():
    env = a_pool("loop")
    agent = IMPALA(
        IMPALAConfig(unroll_length=8, batch_size=4, total_learner_steps=8), env.observation_spec, env.action_spec
    )
    replay_buffer = ReplayBuffer(agent)
    learner = Learner(LearnerConfig(max_learner_steps=8, data=DataConfig(prefetch=1)), agent, replay_buffer)
    actor = Actor(env, Inferencer(InferencerConfig(), agent, learner), replay_buffer, logger=Rows())
    thread = threading.Thread(target=actor.run)
    thread.start()
    learner.run()
    actor.stop()
    thread.join(60.0)
    assert learner.learner_steps == 8
    step, logs = actor._logger[0]
    assert 0 < step <= actor.env_steps and set(logs) == {"episode_return", "episode_length", "episodes"}
    actor.close()
    learner.close()


def test_actor_accepts_a_replay_buffer_with_only_an_add_method():
    class Local:
        def add(self, data):
            self.data = data

    env, replay_buffer = a_pool("loop"), Local()
    agent = PPO(PPOConfig(), env.observation_spec, env.action_spec)
    inferencer = Inferencer(InferencerConfig(), agent, Learner(LearnerConfig(), agent, ReplayBuffer(agent)))
    actor = Actor(env, inferencer, replay_buffer, rank=2)
    assert actor.step() is None
    ids, step = replay_buffer.data
    assert ids.tolist() == [2_000_000, 2_000_001, 2_000_002, 2_000_003]
    assert step.timestep.observation.shape == step.next_timestep.observation.shape == (4, 4)
    actor.close()


PROGRAM = """
import sys

import launchpad as lp

import rlframe
from rlframe import Actor, EnvServer, Inferencer, InferencerConfig, Learner, LearnerConfig
from rlframe import ReverbReplayBuffer, SharedMemReplayBuffer, SyncEnv
from rlframe.agents import IMPALA, IMPALAConfig


def env_builder(seed):
    return SyncEnv("CartPole-v1", 4, "loop", seed=seed)


def make_program(kind, num_actors=2):
    env = env_builder(1)
    config = IMPALAConfig(unroll_length=10, batch_size=4, learning_rate=6e-4)
    agent = IMPALA(config, env.observation_spec, env.action_spec)
    env.close()
    learner_cfg, inferencer_cfg = LearnerConfig(max_learner_steps=20), InferencerConfig()
    program = lp.Program(kind)
    add = program.add_node
    if kind == "distributed":
        with program.group("replay"):
            replay_buffer = add(lp.ReverbNode(ReverbReplayBuffer.tables(agent)))
    else:
        replay_buffer = SharedMemReplayBuffer(agent, num_writers=num_actors)
    with program.group("learner"):
        learner = add(lp.CourierNode(Learner, learner_cfg, agent, replay_buffer))
    if kind != "heavy_env":
        with program.group("inferencer"):
            inferencer = add(lp.CourierNode(Inferencer, inferencer_cfg, agent, learner))
    with program.group("actor"):
        for rank in range(num_actors):
            if kind == "heavy_env":
                inferencer = Inferencer(inferencer_cfg, agent, learner)
            # "env_builder: can generate a local or remote env"
            envs = add(lp.CourierNode(EnvServer, env_builder, rank)) if kind == "remote_env" else env_builder
            actor = add(lp.CourierNode(Actor, envs, inferencer, replay_buffer))
    return program, replay_buffer


if __name__ == "__main__":
    program, kept = make_program(sys.argv[1])
    lp.launch(program, launch_type="local_mp", terminal="current_terminal").wait()
    print("ended")
"""


@pytest.mark.system
@pytest.mark.parametrize("kind", ["heavy_env", "light_env", "remote_env", "distributed"])
def test_programs_in_the_design_document_run_with_launchpad(kind, tmp_path: pathlib.Path):
    needs("launchpad", "reverb")
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {"PYTHONPATH": str(pathlib.Path(rlframe.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "program.py", kind],
        cwd=tmp_path,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=240.0,
    )
    assert done.returncode == 0 and "ended" in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize("phrase", ["python for loop", "python thread", "python multiprocess", "Python Thread"])
def test_sync_env_accepts_the_type_names_in_the_design_document(phrase):
    with SyncEnv("CartPole-v1", 2, phrase, num_workers=1) as env:
        first, second = env.reset(), env.step(np.zeros(2, np.int32))
    name = {"python for loop": "loop", "python multiprocess": "process"}.get(phrase, "thread")
    with SyncEnv("CartPole-v1", 2, name, num_workers=1) as env:
        np.testing.assert_array_equal(first.observation, env.reset().observation)
        np.testing.assert_array_equal(second.observation, env.step(np.zeros(2, np.int32)).observation)


@pytest.mark.parametrize("phrase", ["python thread", "python multiprocess", "c++ threadpool"])
def test_async_env_accepts_the_type_names_in_the_design_document(phrase):
    with AsyncEnv("CartPole-v1", 2, 1, type=phrase, num_workers=1) as env:
        (env_id,), timestep = env.recv()
        env.send([env_id], np.zeros(1, np.int32))
    assert timestep.step_type.tolist() == [0] and timestep.observation.shape == (1, 4)


def test_cpp_threadpool_selects_envpool():
    with SyncEnv("CartPole-v1", 2, "c++ threadpool") as env:
        assert type(env._pool) is EnvPoolAdapter and env.reset().observation.shape == (2, 4)
    with pytest.raises(UsageError, match="'envpool' requires the name of an EnvPool task, not a builder"):
        SyncEnv(lambda: None, 2, "c++ threadpool")


def test_error_for_a_misspelled_type_suggests_the_correct_type():
    with pytest.raises(UsageError, match="got 'c\\+\\+ thread pool'. Did you mean 'c\\+\\+ threadpool'"):
        SyncEnv("CartPole-v1", 2, "c++ thread pool")
    with pytest.raises(UsageError, match="got 'python for loop'"):
        AsyncEnv("CartPole-v1", 2, 1, "python for loop")
    with pytest.raises(UsageError, match="got None"):
        SyncEnv("CartPole-v1", 2, None)


def test_env_builder_may_return_remote_environments():
    """Local and remote environments have the same methods. The document: "can generate a local or remote env"."""
    for builder in (functools.partial(SyncEnv, "CartPole-v1", 2), functools.partial(AsyncEnv, "CartPole-v1", 2, 1)):
        node = InProcess().serve(public_methods(EnvServer(builder)))
        env = as_pool(Remote([node.address], "EnvServer", 60.0, None, InProcess()))
        if env.is_sync:
            assert env.reset().observation.shape == env.step(np.zeros(2, np.int32)).observation.shape == (2, 4)
        else:
            env_ids, timestep = env.recv()
            env.send(env_ids, np.zeros(1, np.int32))
            assert env_ids.shape == (1,) and timestep.observation.shape == (1, 4)
        node.stop()


def test_learner_step_called_with_the_arguments_in_the_design_document_shows_our_arguments():
    env, agent = pool_and_agent()
    learner = Learner(LearnerConfig(), agent, ReplayBuffer(agent))
    params = agent.initial_params(jax.random.PRNGKey(0))
    with pytest.raises(UsageError, match=r"learner.step\(batch\).*agent.learner_step\(params, learner_state, batch\)"):
        learner.step(params, agent.initial_learner_state(params), None)
    learner.close()
    env.close()


def test_add_called_with_the_arguments_in_the_design_document_shows_our_arguments():
    env, agent = pool_and_agent()
    replay_buffer = ReplayBuffer(agent)
    replay_buffer.claim_rank(4)
    with pytest.raises(UsageError, match=r"add\(\) expects \(env_ids, step\)"):
        replay_buffer.add(np.arange(4), env.reset())
    env.close()


def test_actor_run_takes_no_arguments_and_the_reason_is_documented():
    assert list(inspect.signature(Actor.run).parameters) == ["self"]
    page = (pathlib.Path(__file__).parents[2] / "tests/design/README.md").read_text()
    ((_, document, here, reason, _),) = (line.split("|") for line in page.splitlines() if "`run` with queues" in line)
    assert "gRPC or local queues" in document and "`Actor.run()` takes nothing" in here and "a queue" in reason


def test_learner_makes_its_dataset_from_the_data_config():
    assert list(inspect.signature(Learner._make_dataset).parameters) == ["self", "data_cfg"]


def test_second_actor_without_a_rank_is_refused_if_both_actors_share_a_buffer():
    class Local:
        def add(self, data): ...

    class Acts:
        def inference(self, env_ids, timestep): ...

    replay_buffer = Local()
    actor = Actor(a_pool("loop"), Acts(), replay_buffer)
    with pytest.raises(UsageError, match="Give each Actor its own rank"):
        Actor(a_pool("loop"), Acts(), replay_buffer)
    actor.close()


def test_passing_a_launchpad_node_instead_of_its_handle_is_refused():
    needs("launchpad")
    import launchpad as lp

    env, agent = pool_and_agent()
    learner = lp.CourierNode(Learner, LearnerConfig(), agent, ReplayBuffer(agent))
    with pytest.raises(
        UsageError, match=r"A CourierNode was given as the learner: give the handle that program.add_node"
    ):
        Inferencer(InferencerConfig(), agent, learner)
    env.close()


def pool_and_agent():
    env = a_pool("loop")
    return env, PPO(PPOConfig(), env.observation_spec, env.action_spec)
