"""SAC on HalfCheetah-v4 in one plain loop: EnvPool, numpy arrays, and the jitted update of `rlframe.agents.SAC`.

This is the reference for `rlframe train`: the same update and acting function, compiled in the same way, with nothing
between them. There are no logs and no checkpoints. Prints one JSON object.

    python bare_sac.py --steps 6000 --warm-up 1500
"""

import argparse
import json
import time

import numpy as np

LEARNING_STARTS, BATCH, DISCOUNT = 1_000, 256, 0.99


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6_000, help="environment steps to run")
    parser.add_argument("--warm-up", type=int, default=1_500, help="steps before the clock starts, included in --steps")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    import envpool
    import jax
    from dm_env import specs

    from rlframe import compilation
    from rlframe.agents import SAC, SACConfig
    from rlframe.types import Batch, TimeStep, TransitionBatch

    env = envpool.make_gymnasium("HalfCheetah-v4", num_envs=1, num_threads=1, seed=args.seed)
    space = env.action_space
    action_spec = specs.BoundedArray(space.shape, np.float32, space.low, space.high)
    agent = SAC(SACConfig(batch_size=BATCH), specs.Array(env.observation_space.shape, np.float32), action_spec)
    params = agent.initial_params(jax.random.PRNGKey(args.seed))
    state = agent.initial_learner_state(params)
    params, state = jax.tree.map(jax.numpy.copy, (params, state))  # donated arrays must be distinct

    def act(params, steps, uniform, timestep):
        rng = jax.random.fold_in(jax.random.PRNGKey(0), steps)
        return agent.actor_step(rng, type(published)(params, uniform), timestep, ())[0].action

    published = agent.actor_params(params, state)
    act = compilation.jit(act, differentiates=False)
    update = compilation.jit(agent.learner_step, donate_argnums=(0, 1), differentiates=True)
    random = np.random.Generator(np.random.PCG64(args.seed))

    observations = np.empty((args.steps + 1, *env.observation_space.shape), np.float32)
    next_observations = np.empty_like(observations)
    actions = np.empty((args.steps + 1, *space.shape), np.float32)
    rewards, discounts = (np.empty(args.steps + 1, np.float32) for _ in range(2))
    one = np.ones(1, np.float32)
    observation = env.reset()[0].astype(np.float32)
    clock = None
    for step in range(args.steps):
        timestep = TimeStep(np.ones(1, np.uint8), one, one, observation)
        uniform = np.float32(step < LEARNING_STARTS)
        action = np.asarray(act(params.policy, np.uint32(step), uniform, timestep))
        following, reward, terminated, truncated, _ = env.step(action)
        following = following.astype(np.float32)
        observations[step], actions[step], next_observations[step] = observation[0], action[0], following[0]
        rewards[step], discounts[step] = reward[0], DISCOUNT * (1 - terminated[0])
        observation = env.reset()[0].astype(np.float32) if terminated[0] or truncated[0] else following
        if step >= LEARNING_STARTS:
            rows = random.integers(step + 1, size=BATCH)
            arrays = (observations, actions, rewards, discounts, next_observations)
            data = TransitionBatch(*(array.take(rows, axis=0) for array in arrays), {})
            params, state, logs = update(params, state, Batch(data, (), np.full(BATCH, 1 / (step + 1), np.float32), ()))
        if step == args.warm_up:
            logs["loss"].block_until_ready()
            clock = time.time()
    loss = float(logs["loss"])
    rate = (args.steps - args.warm_up - 1) / (time.time() - clock)
    print(json.dumps({"steps": args.steps, "steps_per_second": rate, "loss": loss}))


if __name__ == "__main__":
    main()
