"""Stable-Baselines3's PPO on CartPole or Pong, with rlframe's settings. Prints one JSON object.

    python sb3_ppo.py cartpole --steps 60000 [--solve-every 4096]
    python sb3_ppo.py pong --steps 6144

CartPole uses the settings of rl-baselines3-zoo, hyperparams/ppo.yml. Pong uses the settings of CleanRL's
ppo_atari_envpool.py, with EnvPool.
"""

import argparse
import json
import os
import time

import numpy as np


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("env", choices=("cartpole", "pong"))
    parser.add_argument("--steps", type=int, required=True, help="environment steps to run")
    parser.add_argument("--warm-up", type=int, required=True, help="steps before the clock starts, included in --steps")
    parser.add_argument("--solve-every", type=int, default=0, help="steps between evaluations; stop when solved")
    parser.add_argument("--total", type=int, default=100_000, help="steps in which rates fall to 0")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 uses torch's default")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


args = parse()
started = float(os.environ.get("RLFRAME_BENCH_STARTED", time.time()))  # includes the start of the interpreter

import gymnasium  # noqa: E402
import stable_baselines3  # noqa: E402
import torch  # noqa: E402
from stable_baselines3 import PPO  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.vec_env import VecEnv  # noqa: E402

if args.threads:
    torch.set_num_threads(args.threads)


class EnvPoolVecEnv(VecEnv):
    """EnvPool's Pong as a Stable-Baselines3 VecEnv, which resets in the call that ends an episode."""

    def __init__(self, num_envs, seed):
        import envpool

        # SB3 wraps Atari with episodic lives and clipped rewards. EnvPool can do both itself.
        self.pool = envpool.make_gymnasium(
            "Pong-v5", num_envs=num_envs, seed=seed, episodic_life=True, reward_clip=True
        )
        super().__init__(num_envs, self.pool.observation_space, self.pool.action_space)

    def reset(self):
        return self.pool.reset()[0]

    def step_async(self, actions):
        self.actions = actions.astype(np.int32)

    def step_wait(self):
        observation, reward, terminated, truncated, _ = self.pool.step(self.actions)
        done = terminated | truncated
        infos = [{} for _ in range(self.num_envs)]
        if done.any():
            for i in np.flatnonzero(done):
                infos[i] = {"terminal_observation": observation[i].copy(), "TimeLimit.truncated": bool(truncated[i])}
            ended = np.flatnonzero(done).astype(np.int32)
            observation = observation.copy()
            observation[ended] = self.pool.reset(ended)[0]
        return observation, reward, done, infos

    def close(self):
        pass  # EnvPool's close() fails with older versions of Gymnasium

    def get_attr(self, attr_name, indices=None):
        return [None] * self.num_envs

    def set_attr(self, attr_name, value, indices=None):
        pass

    def env_method(self, method_name, *method_args, indices=None, **method_kwargs):
        return [None] * self.num_envs

    def env_is_wrapped(self, wrapper_class, indices=None):
        return [False] * self.num_envs


class Meter(BaseCallback):
    """Starts the clock after the warm-up, or checks between updates whether CartPole is solved.

    There are two measures: a mean return of 475 in 20 greedy episodes, evaluated at fixed intervals, and Gym's own
    measure, the last 100 training episodes. The time of evaluations is excluded.
    """

    def __init__(self):
        super().__init__()
        self.clock = self.clock_steps = None
        self.evaluated = self.last_100 = None
        self.evaluating, self.next_evaluation = 0.0, args.solve_every
        self.eval_env = None

    def _on_rollout_start(self):
        if self.clock is None and self.num_timesteps >= args.warm_up:
            self.clock, self.clock_steps = time.time(), self.num_timesteps
        if not args.solve_every:
            return
        if self.evaluated is None and self.num_timesteps >= self.next_evaluation:
            self.next_evaluation += args.solve_every
            if self.evaluate() >= 475:
                self.evaluated = self.now()
        returns = [episode["r"] for episode in self.model.ep_info_buffer]
        if self.last_100 is None and len(returns) == 100 and np.mean(returns) >= 475:
            self.last_100 = self.now()

    def now(self):
        return {"steps": self.num_timesteps, "seconds": time.time() - started - self.evaluating}

    def evaluate(self):
        before = time.time()
        if self.eval_env is None:
            self.eval_env = make_vec_env("CartPole-v1", n_envs=20, seed=10_000 + args.seed)
        mean, _ = evaluate_policy(self.model, self.eval_env, n_eval_episodes=20)
        self.evaluating += time.time() - before
        return mean

    def _on_step(self):
        return self.evaluated is None or self.last_100 is None


def falling(start):
    # SB3 passes the remaining fraction of `total_timesteps`. Our schedules fall over --total steps, for any --steps.
    return lambda left: start * max(0.0, 1 - (1 - left) * args.steps / args.total)


def main():
    if args.env == "cartpole":
        env = make_vec_env("CartPole-v1", n_envs=8, seed=args.seed)
        settings = {
            "policy": "MlpPolicy", "n_steps": 32, "batch_size": 256, "n_epochs": 20, "gae_lambda": 0.8, "gamma": 0.98,
            "ent_coef": 0.0, "learning_rate": falling(1e-3), "clip_range": falling(0.2),
        }  # fmt: skip
    else:
        env = EnvPoolVecEnv(8, args.seed)
        settings = {
            "policy": "CnnPolicy", "n_steps": 128, "batch_size": 256, "n_epochs": 4, "gae_lambda": 0.95, "gamma": 0.99,
            "ent_coef": 0.01, "vf_coef": 0.5, "learning_rate": 2.5e-4, "clip_range": 0.1, "clip_range_vf": 0.1,
        }  # fmt: skip
    model = PPO(settings.pop("policy"), env, seed=args.seed, device="cpu", **settings)
    meter = Meter()
    model.learn(args.steps, callback=meter)
    now = time.time()
    result = {"steps": model.num_timesteps, "threads": torch.get_num_threads()}
    if args.solve_every:
        result.update(evaluated=meter.evaluated, last_100=meter.last_100)
    else:
        result["steps_per_second"] = (model.num_timesteps - meter.clock_steps) / (now - meter.clock)
    result["versions"] = {
        "stable-baselines3": stable_baselines3.__version__, "torch": torch.__version__,
        "gymnasium": gymnasium.__version__,
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
