"""JAX environments follow the data contract, and equal Gymnasium's environments."""

from __future__ import annotations

import pickle
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlframe import compilation
from rlframe.envs import AsyncEnv, SyncEnv, default_type, list_envs
from rlframe.envs.jax_env import BatchedJaxEnv
from rlframe.envs.jax_envs import looks_like_jax_env
from rlframe.envs.jax_envs.breakout import Breakout
from rlframe.envs.jax_envs.classic import RED, Acrobot, AcrobotState, CartPole, CartPoleState, Pendulum, PendulumState
from rlframe.errors import EnvError, UsageError
from rlframe.types import FIRST, LAST, MID


class Countdown:
    """Ends after a random number of steps: terminates if the number is even, is truncated if it is odd."""

    observation_space = specs.Array((2,), np.float32, "observation")
    action_space = specs.DiscreteArray(3, np.int32, "action")

    def reset(self, rng: jax.Array) -> tuple[Any, Any]:
        length = jax.random.randint(rng, (), 1, 5)
        return (length, jnp.int32(0)), jnp.array([length, 0], jnp.float32)

    def step(self, rng: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        length, time = state[0], state[1] + 1
        ends = time >= length
        observation = jnp.array([length, time], jnp.float32)
        return (length, time), observation, action.astype(jnp.float32), ends & (length % 2 == 0), ends


def play(pool: SyncEnv, steps: int, actions: Any) -> list[Any]:
    """Return the timesteps of a pool after a reset: step types, rewards, discounts and observations [T, B, ...]."""
    timesteps = [pool.reset()] + [pool.step(actions) for _ in range(steps)]
    return [np.stack(parts) for parts in zip(*timesteps, strict=True)]


def state_of(cls: type, values: np.ndarray) -> Any:
    values, time = np.asarray(values, np.float32), jnp.int32(0)
    if cls is Acrobot:
        return AcrobotState(jnp.asarray(values), time)
    return (CartPoleState if cls is CartPole else PendulumState)(*map(jnp.float32, values), time)


GYMNASIUM = {"CartPole-v1": CartPole, "Acrobot-v1": Acrobot, "Pendulum-v1": Pendulum}


@pytest.mark.parametrize("name", GYMNASIUM)
def test_step_from_the_same_state_equals_gymnasium(name):
    cls = GYMNASIUM[name]
    env, step = gymnasium.make(name), jax.jit(cls().step)
    env.reset(seed=0)
    env.action_space.seed(0)
    for _ in range(300):
        action, state = env.action_space.sample(), np.array(env.unwrapped.state)
        observation, reward, terminated, truncated, _ = env.step(action)
        _, ours, our_reward, our_end, _ = step(jax.random.PRNGKey(0), state_of(cls, state), jnp.asarray(action))
        np.testing.assert_allclose(ours, observation, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(our_reward, reward, rtol=1e-5, atol=1e-5)
        assert bool(our_end) == terminated
        if terminated or truncated:
            env.reset()
    assert gymnasium.spec(name).max_episode_steps == cls().max_steps


@pytest.mark.parametrize("size", [1, 5, 40])
def test_every_last_observation_is_visible_and_its_discount_tells_termination(size):
    with SyncEnv(Countdown, size, "jax", seed=3) as pool:
        types, rewards, discounts, observations = play(pool, 60, np.full(size, 2))
    assert (types[0] == FIRST).all()
    lengths, times = observations[..., 0], observations[..., 1]
    np.testing.assert_array_equal(times == 0, types == FIRST)
    np.testing.assert_array_equal(times == lengths, types == LAST)
    np.testing.assert_array_equal(types[1:] == FIRST, types[:-1] == LAST)
    np.testing.assert_array_equal(discounts == 0, (types == LAST) & (lengths % 2 == 0))
    np.testing.assert_array_equal(rewards, np.where(types == FIRST, 0, 2))
    assert {1, 2, 3, 4} == set(lengths[types == FIRST].tolist())  # episodes differ


def test_time_limit_truncates_an_episode():
    with SyncEnv("jax:CartPole-v1", 3, seed=1, type="jax", env_kwargs={"max_steps": 4}) as pool:
        types, _, discounts, _ = play(pool, 4, np.array([0, 1, 0]))
    assert (types[4] == LAST).all() and (types[1:4] == MID).all() and (discounts == 1).all()


def test_episodes_depend_only_on_the_seed_and_the_index():
    def first(seed: int, size: int) -> np.ndarray:
        with SyncEnv("jax:CartPole-v1", size, "jax", seed=seed) as pool:
            return play(pool, 30, np.ones(size, np.int32))[3]

    np.testing.assert_array_equal(first(1, 3), first(1, 5)[:, :3])
    assert not np.isclose(first(1, 3), first(2, 3)).any(axis=(0, 2)).all()


def test_pool_continues_exactly_from_a_saved_state():
    actions = np.ones(4, np.int32)
    with SyncEnv(Breakout, 4, "jax", seed=1) as pool, SyncEnv(Breakout, 4, "jax", seed=9) as other:
        play(pool, 25, actions)
        state = pool.get_state()
        expected = [pool.step(actions) for _ in range(30)]
        other.set_state(pickle.loads(pickle.dumps(state)))
        jax.tree.map(np.testing.assert_array_equal, [other.step(actions) for _ in range(30)], expected)


def test_action_repeat_sums_rewards_until_the_episode_ends():
    with SyncEnv(Countdown, 20, "jax", seed=3, action_repeat=3) as pool:
        types, rewards, _, observations = play(pool, 40, np.ones(20, np.int32))
    lengths, times = observations[..., 0], observations[..., 1]
    np.testing.assert_array_equal(times == lengths, types == LAST)
    np.testing.assert_array_equal(times[types == MID], 3)
    np.testing.assert_array_equal(rewards[types == LAST], (lengths - 3 * (lengths == 4))[types == LAST])


def test_frame_stack_of_a_batch_equals_the_wrapper_of_the_host():
    keys = np.stack([jax.random.PRNGKey(i) for i in range(6)]).astype(np.uint32)
    single, stacked = BatchedJaxEnv(Breakout()), BatchedJaxEnv(Breakout(), frame_stack=3)
    with SyncEnv(Breakout, 6, "jax", frame_stack=3) as pool:
        wrapper = pool._stack
    one, many, actions = single.init(keys), stacked.init(keys), jnp.zeros(6, jnp.int32)
    step_one, step_many = (compilation.jit(envs.step, differentiates=False) for envs in (single, stacked))
    for _ in range(30):
        one, timestep = step_one(one, actions)
        many, expected = step_many(many, actions)
        ours = wrapper(jax.tree.map(np.asarray, timestep))
        assert expected.observation.shape == (6, 10, 10, 12)
        np.testing.assert_array_equal(expected.observation, ours.observation)


def test_breakout_breaks_a_brick_and_ends_when_the_ball_is_lost():
    with SyncEnv("jax:Breakout-MinAtar", 1, "jax", seed=0) as pool:
        types, rewards, discounts, observations = play(pool, 200, np.zeros(1, np.int32))
    assert rewards.sum() > 0 and set(np.unique(rewards)) <= {0.0, 1.0}
    last = np.flatnonzero(types[:, 0] == LAST)
    assert len(last) and (discounts[last] == 0).all()
    assert (observations[last, 0, 9, :, 1].sum(axis=1) == 1).all()  # the ball is in the row of the paddle
    first = np.flatnonzero(types[:, 0] == FIRST)
    assert (observations[first, 0, :, :, 3].sum(axis=(1, 2)) == 30).all()  # each episode starts with a full wall
    assert Breakout().render(Breakout().reset(jax.random.PRNGKey(0))[0]).shape == (160, 160, 3)


def test_images_show_the_state():
    def colored(env, state):
        """Return the mean (x, y) of the red pixels, from -1 to 1, with y upward."""
        image = env.render(state)
        assert image.dtype == np.uint8 and image.shape == (256, 256, 3)
        rows, columns = np.nonzero((image == RED).all(axis=-1))
        return columns.mean() / 127.5 - 1, 1 - rows.mean() / 127.5

    # The mean of a red line is its middle. The pole of CartPole covers 1 of 5.2 units, for example.
    assert colored(CartPole(), CartPoleState(0.0, 0.0, 0.0, 0.0, 0)) == pytest.approx((0.0, 0.5 / 2.6), abs=0.01)
    assert colored(CartPole(), CartPoleState(1.3, 0.0, np.pi / 2, 0.0, 0)) == pytest.approx((1.8 / 2.6, 0.0), abs=0.01)
    angles = np.array([np.pi / 2, np.pi / 2, 0.0, 0.0])  # the first link points right, the second one up
    assert colored(Acrobot(), AcrobotState(angles, 0)) == pytest.approx((1.0 / 2.3, 0.5 / 2.3), abs=0.01)
    left = PendulumState(np.pi / 2, 0.0, 0)
    assert colored(Pendulum(), left) == pytest.approx((-0.5 / 1.3, 0.0), abs=0.02)


def test_jax_is_the_default_type_of_jax_environments():
    assert default_type("jax:CartPole-v1", 8) == default_type(Countdown, 8) == "jax"
    assert ("jax:CartPole-v1", "jax") in list_envs()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SyncEnv("jax:CartPole-v1", 2, "loop"), "is a JAX environment: use type 'jax'"),
        (lambda: SyncEnv("CartPole-v1", 2, "jax"), "not a JAX environment: .* mean 'jax:CartPole-v1'"),
        (lambda: SyncEnv("jax:CartPol-v1", 2, "jax"), "Did you mean 'jax:CartPole-v1'"),
        (lambda: SyncEnv(lambda: gymnasium.make("CartPole-v1"), 2, "jax"), "Use type 'loop', 'thread' or 'process'"),
        (lambda: SyncEnv(Countdown(), 2, "jax"), r"got an object of Countdown\."),
        (lambda: SyncEnv(lambda: Countdown(), 2, "loop"), "Countdown, which is a JAX environment: pass its class"),
        (lambda: SyncEnv("jax:CartPole-v1", 2, "jax", num_workers=2), "leave num_workers out"),
        (
            lambda: SyncEnv("jax:CartPole-v1", 2, "jax", env_kwargs={"gravity": 2}),
            "unexpected keyword argument",
        ),
        (lambda: AsyncEnv("jax:CartPole-v1", 2, 1, "jax"), "type must be one of"),
        (lambda: default_type("jax:CartPole-v1", 2, is_sync=False), "cannot be asynchronous"),
    ],
)
def test_jax_environments_refuse_options_that_they_cannot_use(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def _line(function: Any) -> int:
    """Return the number of the second line of a function, which is the first line of its body."""
    return function.__code__.co_firstlineno + 1


class WrongShape(Countdown):
    observation_space = specs.Array((3,), np.float32, "observation")


class WrongState(Countdown):
    def step(self, rng, state, action):
        return (state[0].astype(jnp.float32), state[1]), *super().step(rng, state, action)[1:]


class FourValues(Countdown):
    def step(self, rng, state, action):
        return super().step(rng, state, action)[:4]


class PythonBranch(Countdown):
    def step(self, rng, state, action):
        return super().step(rng, state, action if action > 0 else 0)


class NumpyFunction(Countdown):
    def step(self, rng, state, action):
        return super().step(rng, state, np.square(np.asarray(action)))


class OnlyObservation(Countdown):
    def reset(self, rng):
        return super().reset(rng)[1]


class ComplexReward(Countdown):
    def step(self, rng, state, action):
        state, observation, reward, *ends = super().step(rng, state, action)
        return state, observation, reward + 0j, *ends


class NoReward(Countdown):
    def step(self, rng, state, action):
        state, observation, _, *ends = super().step(rng, state, action)
        return state, observation, None, *ends


class FloatImage(Countdown):
    def render(self, state):
        return np.zeros((int(state[0]), 2, 3), np.float32)  # the state has values, not tracers


class NoImage(Countdown):
    def render(self, state):
        raise KeyError("screen")


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (WrongShape, r"WrongShape.reset returned 'observation' as float32 of shape \(2,\), .* float32 of shape \(3,\)"),
        (WrongState, r"WrongState.step must return a state with the shapes and dtypes .*int32.*, got .*float32"),
        (FourValues, "FourValues.step must return .* got 4 values"),
        (OnlyObservation, r"OnlyObservation.reset must return \(state, observation\), got float32\[2\]\."),
        (ComplexReward, "ComplexReward.step must return a real number or bool as 'reward', got complex64."),
        (NoReward, "NoReward.step must return one number as 'reward', got NoneType."),
        (FloatImage, r"FloatImage must render to an RGB array, .* but it renders to float32 of shape \(\d, 2, 3\)\."),
        (NoImage, r"NoImage.render failed: test_jax_envs.py, line \d+: KeyError: 'screen'"),
        (
            PythonBranch,
            rf"PythonBranch.step cannot be traced by JAX: test_jax_envs.py, line {_line(PythonBranch.step)}: "
            r"TracerBoolConversionError: [^\n]* Use jnp.where or jax.lax.cond instead of `if`",
        ),
        (
            NumpyFunction,
            rf"line {_line(NumpyFunction.step)}: TracerArrayConversionError: .* Use those of jax.numpy",
        ),
    ],
)
def test_error_names_the_mistake_of_an_environment(cls, message):
    with pytest.raises(UsageError, match=message):
        SyncEnv(cls, 2, "jax")


class NoRng(Countdown):
    def step(self, state, action):
        return Countdown.step(self, None, state, action)


class RngLast(Countdown):
    def step(self, state, action, rng):
        return Countdown.step(self, rng, state, action)


class NoResetRng(Countdown):
    def reset(self):
        return Countdown.reset(self, jax.random.PRNGKey(0))


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (NoRng, r"NoRng has step\(state, action\); a JAX environment needs step\(rng, state, action\)."),
        (RngLast, r"RngLast has step\(state, action, rng\); a JAX environment needs step\(rng, state, action\)."),
        (NoResetRng, r"NoResetRng has reset\(\); a JAX environment needs reset\(rng\)."),
    ],
)
def test_class_with_other_parameters_is_refused_by_every_pool(cls, message):
    for make in (
        lambda: default_type(cls, 2),
        lambda: SyncEnv(cls, 2, "loop"),
        lambda: SyncEnv(lambda: cls(), 2, "loop"),
        lambda: SyncEnv(cls, 2, "jax"),
    ):
        with pytest.raises(UsageError, match=message):
            make()


def test_other_environments_are_no_jax_environments():
    class Optional(gymnasium.Env):
        def step(this, action, state=None):
            return None

    assert not looks_like_jax_env(Optional) and not looks_like_jax_env(Optional())
    assert not looks_like_jax_env(gymnasium.make) and looks_like_jax_env(CartPole())


class IntegerObservation(Countdown):
    def reset(self, rng):
        state, observation = super().reset(rng)
        return state, observation.astype(jnp.int32)


def test_observation_of_another_dtype_gives_one_warning(caplog):
    for _ in range(2):
        BatchedJaxEnv(IntegerObservation())
    (warning,) = caplog.messages
    assert "returns 'observation' as int32, but its observation_space has float32" in warning


class Diverging(Countdown):
    def step(self, rng, state, action):
        state, observation, _, terminated, truncated = super().step(rng, state, action)
        return state, observation, jnp.where(action == 2, jnp.nan, 0.0), terminated, truncated


def test_error_for_a_reward_that_is_not_finite_contains_the_id():
    with SyncEnv(Diverging, 3, "jax") as pool, pytest.raises(EnvError, match="Environment 1 gave 'reward' with nan"):
        pool.reset()
        pool.step(np.array([0, 2, 0]))
