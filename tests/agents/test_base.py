"""Tests for all agents: pure functions, pickling, specs, networks of other libraries, and error messages."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import pickle
import re
import subprocess
import sys
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlframe.agents import (
    DQN,
    IMPALA,
    PPO,
    PQN,
    R2D2,
    SAC,
    TD3,
    Agent,
    DQNConfig,
    IMPALAConfig,
    Normalized,
    PPOConfig,
    PQNConfig,
    R2D2Config,
    SACConfig,
    TD3Config,
)
from rlframe.agents.distributions import default_distribution
from rlframe.agents.dqn_heads import Categories, Quantiles
from rlframe.agents.networks import MLPConfig
from rlframe.agents.recurrent import LSTMConfig
from rlframe.errors import UsageError
from rlframe.programs.options import registry
from rlframe.replay import ReplayBuffer
from rlframe.types import AgentOutput, Transition
from tests.agents import batches
from tests.agents.batches import BOX, DISCRETE, IMAGE, MULTI, SMALL_CNN, VECTOR, learn, started

DICT = {"image": IMAGE, "vector": VECTOR, "kind": specs.DiscreteArray(4, name="kind")}
PPO_CONFIG = PPOConfig(unroll_length=8, num_epochs=2, num_minibatches=2)
DQN_CONFIG = DQNConfig(batch_size=16, min_replay_size=16)
IMPALA_CONFIG = IMPALAConfig(unroll_length=8, batch_size=4, total_learner_steps=100)
SAC_CONFIG = SACConfig(batch_size=16, min_replay_size=16)
TD3_CONFIG = TD3Config(batch_size=16, min_replay_size=16)
R2D2_CONFIG = R2D2Config(batch_size=4, sequence_length=5, burn_in=3, period=4, min_replay_size=4)
MATRIX = specs.BoundedArray((2, 1), np.float32, np.array([[-2.0], [0.0]]), np.array([[2.0], [1.0]]), "action")
SMALL_MLP = MLPConfig((8,), "relu")


@functools.cache  # Agents are immutable, so all tests can share each agent and its compiled functions.
def make(name: str) -> Agent:
    return {
        "ppo": lambda: PPO(PPO_CONFIG, VECTOR, DISCRETE),
        "ppo multi-discrete": lambda: PPO(PPO_CONFIG, VECTOR, MULTI),
        "ppo continuous": lambda: PPO(PPO_CONFIG, VECTOR, BOX),
        "ppo images": lambda: PPO(PPO_CONFIG, IMAGE, DISCRETE, SMALL_CNN),
        "ppo dict": lambda: PPO(PPO_CONFIG, DICT, DISCRETE, SMALL_CNN),
        "dqn": lambda: DQN(DQN_CONFIG, VECTOR, DISCRETE),
        "dqn prioritized": lambda: DQN(
            dataclasses.replace(DQN_CONFIG, prioritized=True, total_learner_steps=9), VECTOR, DISCRETE
        ),
        "dqn images": lambda: DQN(DQN_CONFIG, IMAGE, DISCRETE, dataclasses.replace(SMALL_CNN, dueling=True)),
        "dqn dict": lambda: DQN(DQN_CONFIG, {"vector": VECTOR}, DISCRETE),
        "impala": lambda: IMPALA(IMPALA_CONFIG, VECTOR, DISCRETE),
        "impala multi-discrete": lambda: IMPALA(IMPALA_CONFIG, VECTOR, MULTI),
        "impala continuous": lambda: IMPALA(dataclasses.replace(IMPALA_CONFIG, optimizer="adam"), VECTOR, BOX),
        "impala images": lambda: IMPALA(IMPALA_CONFIG, IMAGE, DISCRETE, SMALL_CNN),
        "impala dict": lambda: IMPALA(IMPALA_CONFIG, DICT, DISCRETE, SMALL_CNN),
        "ppo normalized": lambda: Normalized(PPO(PPO_CONFIG, DICT, BOX, SMALL_CNN), rewards=True),
        "sac": lambda: SAC(SAC_CONFIG, VECTOR, BOX, SMALL_MLP),
        "sac matrix": lambda: SAC(SAC_CONFIG, {"a": VECTOR, "b": VECTOR}, MATRIX, SMALL_MLP),
        "sac images": lambda: SAC(SAC_CONFIG, DICT, BOX, SMALL_CNN),
        "dqn atoms": lambda: DQN(
            dataclasses.replace(DQN_CONFIG, head=Categories(5)), VECTOR, DISCRETE, MLPConfig(dueling=True)
        ),
        "dqn quantiles": lambda: DQN(dataclasses.replace(DQN_CONFIG, head=Quantiles(5)), VECTOR, DISCRETE),
        "dqn noisy": lambda: DQN(DQN_CONFIG, VECTOR, DISCRETE, MLPConfig(noisy=0.5)),
        "pqn": lambda: PQN(PQNConfig(unroll_length=8, num_epochs=2, num_minibatches=2, epsilon=0.1), VECTOR, DISCRETE),
        "r2d2": lambda: R2D2(R2D2_CONFIG, VECTOR, DISCRETE, LSTMConfig((8,), 4, dueling=True)),
        "r2d2 images": lambda: R2D2(R2D2_CONFIG, IMAGE, DISCRETE, LSTMConfig((8,), 4, dueling=True)),
        "td3": lambda: TD3(TD3_CONFIG, VECTOR, BOX, SMALL_MLP),
        "td3 matrix": lambda: TD3(TD3_CONFIG, {"a": VECTOR, "b": VECTOR}, MATRIX, SMALL_MLP),
    }[name]()


@functools.cache
def ready(name: str) -> tuple[Agent, Any, Any]:
    """Return an agent, its parameters and its learner state."""
    return (make(name), *started(make(name)))


ONE_OF_EACH = ["ppo dict", "ppo continuous", "dqn images", "dqn noisy", "impala multi-discrete", "pqn"]
ONE_OF_EACH += ["r2d2", "sac matrix", "td3"]
MORE = ["ppo", "ppo multi-discrete", "ppo images", "ppo normalized"]
MORE += ["dqn", "dqn prioritized", "dqn dict", "dqn atoms", "dqn quantiles"]
MORE += ["impala", "impala continuous", "impala images", "impala dict"]
MORE += ["r2d2 images", "sac", "sac images", "td3 matrix"]
AGENTS = [*ONE_OF_EACH, *(pytest.param(name, marks=pytest.mark.system) for name in MORE)]


def batch_for(agent, params, learner_state):
    if isinstance(agent.replay_spec.item, Transition):
        return batches.transitions(agent)
    return batches.sequences(agent, params, learner_state)


@pytest.mark.parametrize(
    "name", ["ppo continuous", "impala multi-discrete", "dqn images", "pqn", "r2d2", "sac matrix", "td3"]
)  # these agents are also in ONE_OF_EACH
def test_docs_of_metrics_list_the_logs_of_each_agent(name):
    agent, params, learner_state = ready(name)
    logs = jax.eval_shape(agent.learner_step, params, learner_state, batch_for(agent, params, learner_state))[2]
    page = (pathlib.Path(__file__).parents[2] / "docs/reference/metrics.md").read_text()
    table = page.partition("## Agents")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*`) \| ([\w, ]+) \|$", table, re.MULTILINE)
    agent_name = name.split()[0].upper()
    named = {log for logs, agents in rows if agent_name in agents.split(", ") for log in re.findall(r"\w+", logs)}
    assert named == set(logs) - {"loss", "priorities"}


@pytest.mark.parametrize("name", AGENTS)
def test_acting_with_the_same_key_gives_the_same_result_and_matches_the_specs(name):
    agent, params, learner_state = ready(name)
    first, again = (batches.act(agent, params, learner_state) for _ in range(2))
    batches.assert_trees_equal(first, again)
    spec = agent.step_spec
    assert {leaf.shape for leaf in jax.tree.leaves(first.action)} == {(4, *spec.action.shape)}
    for key, leaf_spec in spec.extras.items():
        assert first.extras[key].shape == (4, *leaf_spec.shape) and first.extras[key].dtype == leaf_spec.dtype
    for action in np.asarray(first.action):
        agent.action_spec.validate(action)


@pytest.mark.parametrize("name", AGENTS)
def test_learner_step_is_a_pure_function(name):
    agent, params, learner_state = ready(name)
    batch = batch_for(agent, params, learner_state)
    kept = jax.tree.map(np.array, (params, learner_state, batch))
    first, again = (learn(agent, params, learner_state, batch) for _ in range(2))
    batches.assert_trees_equal(first, again)
    batches.assert_trees_equal((params, learner_state, batch), kept)
    assert getattr(first[1], "agent", first[1]).steps == 1 and np.isfinite(first[2]["loss"])
    changed = jax.tree.map(lambda old, new: bool(np.any(old != new)), params, first[0])
    assert any(jax.tree.leaves(changed))


PICKLED = ["ppo dict", "r2d2", "sac matrix"]
PICKLED += [pytest.param(name, marks=pytest.mark.system) for name in ONE_OF_EACH if name not in PICKLED]


@pytest.mark.parametrize("name", PICKLED)
def test_unpickled_agent_acts_and_learns_like_the_original(name):
    agent, params, learner_state = ready(name)
    agent.optimizer, agent.step_spec  # noqa: B018 (cached now, but must not be pickled)
    copied = pickle.loads(pickle.dumps(agent))
    batches.assert_trees_equal(started(copied), (params, learner_state))
    batches.assert_trees_equal(batches.act(copied, params, learner_state), batches.act(agent, params, learner_state))
    assert len(pickle.dumps(agent)) < 10_000


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_eval_step_does_not_depend_on_the_random_key(name):
    agent, params, learner_state = ready(name)
    actor_params = agent.actor_params(params, learner_state)
    seen = batches.timestep(agent.observation_spec, 4)
    actions = [
        agent.eval_step(jax.random.PRNGKey(seed), actor_params, seen, agent.initial_state(4))[0].action
        for seed in range(3)
    ]
    np.testing.assert_array_equal(actions[0], actions[1])
    np.testing.assert_array_equal(actions[0], actions[2])


class PlainNetwork:
    """A network that uses no library: two functions on a dict of arrays."""

    def __init__(self, observation_spec, action_spec):
        self.sizes = (observation_spec.shape[0], action_spec.num_values)

    def init(self, rng, observation):
        return {"w": 0.1 * jax.random.normal(rng, self.sizes), "v": jnp.zeros((self.sizes[0],))}

    def apply(self, params, observation):
        return observation @ params["w"], observation @ params["v"]


class PlainValues(PlainNetwork):
    def apply(self, params, observation):
        return observation @ params["w"]


class WrongValues(PlainNetwork):
    def apply(self, params, observation):
        return jnp.zeros((len(observation), 4))


@pytest.mark.parametrize(
    ("agent_cls", "cfg", "factory"),
    [
        (PPO, PPO_CONFIG, PlainNetwork),
        pytest.param(IMPALA, IMPALA_CONFIG, PlainNetwork, marks=pytest.mark.system),
        (DQN, DQN_CONFIG, PlainValues),
    ],
)
def test_any_object_with_init_and_apply_can_be_a_network(agent_cls, cfg, factory):
    agent = agent_cls(cfg, VECTOR, DISCRETE, net_factory=factory)
    params, learner_state = started(agent)
    assert params.keys() == {"w", "v"}
    changed = learn(agent, params, learner_state, batch_for(agent, params, learner_state))[0]
    assert np.any(changed["w"] != params["w"])


def test_net_factory_that_returns_no_network_is_rejected():
    with pytest.raises(UsageError, match=r"init\(rng, observation\) and apply\(params, observation\), got 7"):
        PPO(PPO_CONFIG, VECTOR, DISCRETE, net_factory=lambda observation_spec, action_spec: 7)


@pytest.mark.parametrize(
    ("agent_cls", "cfg", "factory", "match"),
    [
        (PPO, PPO_CONFIG, PlainValues, r"of PlainValues gives \[B, 3\]; .* must give \(\[B, 3\], \[B, 1\]\)\."),
        (DQN, DQN_CONFIG, WrongValues, r"of WrongValues gives \[B, 4\]; .* must give \[B, 3\]\."),
    ],
)
def test_network_with_wrong_outputs_is_rejected(agent_cls, cfg, factory, match):
    with pytest.raises(UsageError, match=match):
        agent_cls(cfg, VECTOR, DISCRETE, net_factory=factory)


def test_config_of_another_class_is_rejected():
    with pytest.raises(UsageError, match="PPO needs a PPOConfig as its config, got DQNConfig"):
        PPO(DQN_CONFIG, VECTOR, DISCRETE)


def test_error_about_a_wrong_observation_names_the_wrong_leaf():
    agent = PPO(PPO_CONFIG, {"eyes": VECTOR}, DISCRETE)
    with pytest.raises(UsageError, match=r"observation\['eyes'\] should be \[B, 3\] float32, got \[4, 2\] float32"):
        agent.check_observation({"eyes": np.zeros((4, 2), np.float32)})
    with pytest.raises(UsageError, match=r"got \[4, 3\] float64"):
        agent.check_observation({"eyes": np.zeros((4, 3))})
    with pytest.raises(UsageError, match=r"has the leaves \['ears'\], but its spec has \['eyes'\]"):
        agent.check_observation({"ears": np.zeros((4, 3), np.float32)})
    agent.check_observation({"eyes": np.zeros((4, 3), np.float32)})


class WrongActions(PPO):
    def actor_step(self, rng, params, timestep, state):
        return AgentOutput(jnp.zeros((timestep.reward.shape[0], 2))), state


def test_agent_whose_actions_do_not_match_the_action_spec_is_rejected():
    with pytest.raises(UsageError, match=r"WrongActions: action should be \[B\] int32, got \[1, 2\] float32"):
        WrongActions(PPO_CONFIG, VECTOR, DISCRETE).step_spec  # noqa: B018


@pytest.mark.parametrize(
    ("after", "match"),
    [
        (
            lambda state: state[:, :2],
            r"ChangingState: the state after actor_step, .* should be \[B, 3\] float32, got \[1, 2\] ",
        ),
        (lambda state: state.astype(jnp.float16), r"should be \[B, 3\] float32, got \[1, 3\] float16"),
        (lambda state: (state, state), r"initial_state gives it, has the leaves \[0\], \[1\], .* \(a single array\)"),
    ],
)
def test_error_about_a_recurrent_state_with_changing_shape_names_the_agent(after, match):
    class ChangingState(PPO):
        def initial_state(self, batch_size):
            return np.zeros((batch_size, 3), np.float32)

        def actor_step(self, rng, params, timestep, state):
            output, _ = super().actor_step(rng, params, timestep, ())
            return output, after(state)

    with pytest.raises(UsageError, match=match):
        ReplayBuffer(ChangingState(PPO_CONFIG, VECTOR, DISCRETE))


@dataclasses.dataclass(frozen=True)
class MeanConfig:
    learning_rate: float = 0.1


class MeanAgent(Agent):
    """An agent that only defines `loss` and inherits the methods that `learner_step` calls."""

    config_cls = MeanConfig

    def initial_params(self, rng):
        return {"mean": jnp.zeros(())}

    def loss(self, params, learner_state, batch):
        error = params["mean"] - jnp.mean(batch.data.reward)
        return jnp.square(error), {"error": error}


def test_agent_that_only_defines_a_loss_learns():
    agent = MeanAgent(MeanConfig(), VECTOR, DISCRETE)
    params, learner_state = started(agent)
    batch = batches.transitions(agent)
    step = jax.jit(agent.learner_step)
    for _ in range(200):
        params, learner_state, logs = step(params, learner_state, batch)
    np.testing.assert_allclose(params["mean"], batch.data.reward.mean(), atol=1e-3)
    assert learner_state.steps == 200 and set(logs) == {"loss", "error"}


@pytest.mark.parametrize(
    ("name", "arguments", "match"),
    [
        (
            "initial_learnerstate",
            "self, params",
            r"Mine defines initial_learnerstate, .* is initial_learner_state\(params\)",
        ),
        ("update_learnerstate", "self, params", r"is update_learner_state\(params, opt_state, learner_state\)"),
        ("compute_gradient", "self", r"is compute_gradients\(params, learner_state, batch\)"),
        (
            "compute_gradients",
            "self, params, batch",
            r"compute_gradients takes \(params, batch\); it is called with \(params, l",
        ),
        (
            "loss",
            "self, params, batch, learner_state",
            r"loss takes \(params, batch, learner_state\); it is called with",
        ),
        ("actor_step", "self, rng, params, timestep", r"called with \(rng, params, timestep, state\)"),
    ],
)
def test_method_with_misspelled_name_or_wrong_arguments_is_rejected_at_class_definition(name, arguments, match):
    scope = {"Agent": Agent}
    with pytest.raises(UsageError, match=match):
        exec(f"class Mine(Agent):\n    def {name}({arguments}): ...", scope)


def test_additional_methods_and_renamed_arguments_are_accepted():
    class Mine(MeanAgent):
        def loss(self, p, s, b, weight=1.0):
            return super().loss(p, s, b)

        def evaluate(self, anything):
            return self._learner_steps()

        def _learner_steps(self): ...

        jit_learner_step = False

    assert Mine(MeanConfig(), VECTOR, DISCRETE).jit_learner_step is False


def test_config_that_is_not_a_dataclass_itself_is_rejected_at_class_definition():
    class Config(PPOConfig):
        cost: float = 0.1

    with pytest.raises(
        UsageError, match=r"Config\.cost is not an option, because Config is not a dataclass\. Add @data"
    ):
        type("Mine", (PPO,), {"config_cls": Config})
    assert type("Mine", (PPO,), {"config_cls": dataclasses.dataclass(frozen=True)(Config)}).config_cls is Config


def test_loss_of_an_agent_that_learns_from_minibatches_names_the_other_method():
    with pytest.raises(NotImplementedError, match="PPO learns from minibatches: call minibatch_loss"):
        PPO(PPOConfig(total_learner_steps=1), VECTOR, DISCRETE).loss({}, (), None)


def test_error_names_a_misspelled_argument_of_an_agent():
    with pytest.raises(UsageError, match="PPO has no argument obs_spec. Did you mean 'observation_spec'?"):
        PPO(PPO_CONFIG, obs_spec=VECTOR, action_spec=DISCRETE)
    with pytest.raises(UsageError, match="PPO has no argument policy_factor. Did you mean 'policy_factory'?"):
        PPO(PPO_CONFIG, VECTOR, DISCRETE, policy_factor=None)


OWN = """
import functools

from rlframe.agents import PPO


class Own(PPO):
    @functools.cached_property
    def halved(self):
        return self.cfg.discount / 2
"""


@pytest.mark.system
def test_agent_from_a_user_file_may_have_cached_properties(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    agent = registry.agent_class(f"{tmp_path}/own.py:Own")(PPO_CONFIG, VECTOR, DISCRETE)
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).halved)"
    done = subprocess.run([sys.executable, "-c", code], input=cloudpickle.dumps(agent), capture_output=True, check=True)
    assert float(done.stdout) == agent.halved == PPO_CONFIG.discount / 2


@pytest.mark.parametrize(
    ("agent_cls", "cfg", "action_spec"),
    [
        (DQN, DQN_CONFIG, DISCRETE),
        (PQN, PQNConfig(), DISCRETE),
        (R2D2, R2D2_CONFIG, DISCRETE),
        (SAC, SAC_CONFIG, BOX),
        (TD3, TD3_CONFIG, BOX),
    ],
)
def test_agent_with_a_fixed_distribution_rejects_a_policy_factory(agent_cls, cfg, action_spec):
    with pytest.raises(UsageError, match=f"{agent_cls.__name__} accepts no policy_factory.*PPO and IMPALA accept"):
        agent_cls(cfg, VECTOR, action_spec, policy_factory=default_distribution)
    # None is accepted. The constructor of the base class sets `policy_factory`.
    assert agent_cls(cfg, VECTOR, action_spec, SMALL_MLP, None).policy_factory is None


def test_agent_without_net_factory_parameter_rejects_a_net_factory():
    class Own(Agent):
        def __init__(self, cfg, observation_spec, action_spec):
            super().__init__(cfg, observation_spec, action_spec)

    with pytest.raises(UsageError, match="Own makes its own network .* leave --network out"):
        Own(MeanConfig(), VECTOR, DISCRETE, net_factory=MLPConfig())
    assert PPO(PPO_CONFIG, VECTOR, DISCRETE, net_factory=MLPConfig(hidden=(3,))).net_factory.hidden == (3,)
