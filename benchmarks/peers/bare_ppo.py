"""PPO on CartPole without any framework: one plain loop over EnvPool, Haiku, Optax and a jitted update.

This is the reference for rlframe: the same settings and libraries, with nothing between them. Settings are from
rl-baselines3-zoo, hyperparams/ppo.yml, CartPole-v1. Prints one JSON object.

    python bare_ppo.py --steps 100000 [--tuned]     (XLA_FLAGS selects XLA's CPU runtime)
"""

import argparse
import collections
import json
import os
import sys
import time

NUM_ENVS, UNROLL, EPOCHS = 8, 32, 20
DISCOUNT, GAE_LAMBDA, VALUE_COST, MAX_GRAD_NORM = 0.98, 0.8, 0.5, 0.5
LEARNING_RATE, CLIP = 1e-3, 0.2  # both fall linearly to 0 in --total steps


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60_000, help="environment steps to run")
    parser.add_argument("--warm-up", type=int, default=5_000, help="steps before the clock starts, included in --steps")
    parser.add_argument("--total", type=int, default=100_000, help="steps in which rates fall to 0")
    parser.add_argument("--solve-every", type=int, default=0, help="steps between evaluations; stop when solved")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tuned", action="store_true", help="synchronous dispatch, and one output array per call")
    return parser.parse_args()


args = parse()
started = float(os.environ.get("RLFRAME_BENCH_STARTED", time.time()))  # includes the start of the interpreter

import envpool  # noqa: E402
import haiku as hk  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

if args.tuned:
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def net(observation):
    def mlp(outputs, last_scale):
        x = observation
        for _ in range(2):
            x = jnp.tanh(hk.Linear(64, w_init=hk.initializers.Orthogonal(np.sqrt(2)))(x))
        return hk.Linear(outputs, w_init=hk.initializers.Orthogonal(last_scale))(x)

    return mlp(2, 0.01), mlp(1, 1.0)[..., 0]


network = hk.without_apply_rng(hk.transform(net))


def log_prob_of(logits, action):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], -1)[..., 0]


def act_step(params, key, observation):
    key, sample_key = jax.random.split(key)
    logits, value = network.apply(params, observation)
    action = jax.random.categorical(sample_key, logits).astype(jnp.int32)
    log_prob = log_prob_of(logits, action)
    if args.tuned:
        return key, jnp.stack([jax.lax.bitcast_convert_type(action, jnp.float32), log_prob, value])
    return key, action, log_prob, value


def advantages_of(values, rewards, discounts, live):
    """Compute GAE. All arrays are [T, B] except values [T + 1, B]. `live` is 0 where the action was ignored."""

    def back(advantage, step):
        value, next_value, reward, discount, alive, ends = step
        delta = reward + DISCOUNT * discount * next_value - value
        advantage = alive * (delta + DISCOUNT * GAE_LAMBDA * discount * (1 - ends) * advantage)
        return advantage, advantage

    ends = jnp.concatenate([1 - live[1:], jnp.zeros_like(live[:1])])  # 1 if the action of the next step is ignored
    steps = (values[:-1], values[1:], rewards, discounts, live, ends)
    return jax.lax.scan(back, jnp.zeros_like(values[0]), steps, reverse=True)[1]


optimizer = optax.chain(
    optax.clip_by_global_norm(MAX_GRAD_NORM),
    optax.inject_hyperparams(optax.adam)(learning_rate=LEARNING_RATE, eps=1e-5),
)


def update_step(params, opt_state, left, observations, actions, log_probs, values, rewards, discounts, live):
    last_value = network.apply(params, observations[-1])[1]
    values = jnp.concatenate([values, last_value[None]])
    advantages = advantages_of(values, rewards, discounts, live)
    targets = advantages + values[:-1]
    weight = live / live.sum()
    mean = (weight * advantages).sum()
    advantages = (advantages - mean) / (jnp.sqrt((weight * (advantages - mean) ** 2).sum()) + 1e-8)
    clip = CLIP * left

    def loss_of(params):
        logits, value = network.apply(params, observations[:-1])
        ratio = jnp.exp(log_prob_of(logits, actions) - log_probs)
        surrogate = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip, 1 + clip) * advantages)
        return (weight * (VALUE_COST * (value - targets) ** 2 - surrogate)).sum()

    def epoch(carry, _):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    opt_state[1].hyperparams["learning_rate"] = LEARNING_RATE * left
    # One minibatch of 256 is the whole unroll, so shuffling is not needed.
    (params, opt_state), losses = jax.lax.scan(epoch, (params, opt_state), None, EPOCHS)
    return params, opt_state, losses[-1]


def evaluate(greedy, params, episodes=20):
    env = envpool.make_gymnasium("CartPole-v1", num_envs=episodes, num_threads=1, seed=10_000 + args.seed)
    observation, _ = env.reset()
    returns, running = np.zeros(episodes), np.ones(episodes, bool)
    while running.any():
        observation, reward, terminated, truncated, _ = env.step(np.asarray(greedy(params, observation)))
        returns += reward * running
        running &= ~(terminated | truncated)
    return float(returns.mean())


def main():
    small = {"xla_cpu_multi_thread_eigen": False} if args.tuned else None
    act = jax.jit(act_step, compiler_options=small)
    update = jax.jit(update_step, donate_argnums=(0, 1))
    greedy = jax.jit(lambda params, observation: network.apply(params, observation)[0].argmax(-1).astype(jnp.int32))
    env = envpool.make_gymnasium("CartPole-v1", num_envs=NUM_ENVS, num_threads=1, seed=args.seed)
    observation, _ = env.reset()
    key, init_key = jax.random.split(jax.random.PRNGKey(args.seed))
    params = network.init(init_key, observation)
    opt_state = optimizer.init(params)

    shape = (UNROLL, NUM_ENVS)
    observations = np.empty((UNROLL + 1, NUM_ENVS, 4), np.float32)
    actions, live = np.empty(shape, np.int32), np.empty(shape, np.float32)
    log_probs, values, rewards, discounts = (np.empty(shape, np.float32) for _ in range(4))
    alive = np.ones(NUM_ENVS, np.float32)
    episode_return, returns = np.zeros(NUM_ENVS), collections.deque(maxlen=100)
    steps, clock_steps, clock = 0, 0, None
    evaluated, last_100, evaluating, next_evaluation = None, None, 0.0, args.solve_every
    while steps < args.steps:
        for t in range(UNROLL):
            if args.tuned:
                key, packed = act(params, key, observation)
                packed = np.asarray(packed)
                action = packed[0].view(np.int32)
                log_probs[t], values[t] = packed[1], packed[2]
            else:
                key, action, log_prob, value = act(params, key, observation)
                action = np.asarray(action)
                log_probs[t], values[t] = log_prob, value
            observations[t], actions[t], live[t] = observation, action, alive
            observation, rewards[t], terminated, truncated, _ = env.step(action)
            discounts[t] = 1 - terminated
            episode_return += rewards[t]
            ended = terminated | truncated
            if ended.any():
                returns.extend(episode_return[ended])
                episode_return[ended] = 0
            # After the end of an episode, EnvPool ignores the next action and returns the first timestep of the next
            # episode.
            alive = 1.0 - ended
        observations[UNROLL] = observation
        steps += int(live.sum())
        left = np.float32(max(0.0, 1 - steps / args.total))
        batch = (observations, actions, log_probs, values, rewards, discounts, live)
        params, opt_state, loss = update(params, opt_state, left, *batch)
        if clock is None and steps >= args.warm_up:
            loss.block_until_ready()
            clock, clock_steps = time.time(), steps
        if args.solve_every:
            if evaluated is None and steps >= next_evaluation:
                next_evaluation += args.solve_every
                before = time.time()
                mean = evaluate(greedy, params)
                evaluating += time.time() - before
                if mean >= 475:
                    evaluated = {"steps": steps, "seconds": time.time() - started - evaluating}
            if last_100 is None and len(returns) == 100 and np.mean(returns) >= 475:
                last_100 = {"steps": steps, "seconds": time.time() - started - evaluating}
            if evaluated and last_100:
                break
    loss.block_until_ready()
    now = time.time()
    result = {"steps": steps, "steps_per_second": (steps - clock_steps) / (now - clock) if clock else None}
    if args.solve_every:
        result.update(evaluated=evaluated, last_100=last_100, steps_per_second=None)
    result["versions"] = {"jax": jax.__version__, "envpool": envpool.__version__}
    result["settings"] = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", ""), "tuned": args.tuned}
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
