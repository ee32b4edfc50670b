"""RLlib's IMPALA or PPO on CartPole-v1, with rlframe's settings or RLlib's own. Prints one JSON object.

    python rllib_cartpole.py impala --steps 60000 --warm-up 10000 [--own]

Two env runners correspond to two actors. IMPALA has 8 environments each, PPO 4. The learner runs in the driver.
"""

import argparse
import json
import os
import time

parser = argparse.ArgumentParser()
parser.add_argument("agent", choices=("impala", "ppo"))
parser.add_argument("--steps", type=int, required=True, help="environment steps after the warm-up")
parser.add_argument("--warm-up", type=int, required=True, help="environment steps before the clock starts")
parser.add_argument("--own", action="store_true", help="use RLlib's default batches, unrolls and epochs")
args = parser.parse_args()
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray  # noqa: E402
import torch  # noqa: E402
from ray.rllib.algorithms.impala import IMPALAConfig  # noqa: E402
from ray.rllib.algorithms.ppo import PPOConfig  # noqa: E402
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig  # noqa: E402

STEPS = "num_env_steps_sampled_lifetime"


def impala():
    config = IMPALAConfig().env_runners(num_env_runners=2, num_envs_per_env_runner=8)
    config.training(lr=0.002, gamma=0.99, entropy_coeff=0.01, vf_loss_coeff=0.5, grad_clip=40.0)
    if not args.own:
        config.env_runners(rollout_fragment_length=10).training(train_batch_size_per_learner=80)
    return config


def ppo():
    config = PPOConfig().env_runners(num_env_runners=2, num_envs_per_env_runner=4)
    config.training(lr=1e-3, gamma=0.98, lambda_=0.8, entropy_coeff=0.0, clip_param=0.2)
    if not args.own:
        config.env_runners(rollout_fragment_length=32)
        config.training(train_batch_size_per_learner=256, minibatch_size=256, num_epochs=20)
    return config


def main():
    ray.init(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False, logging_level="error")
    config = (impala if args.agent == "impala" else ppo)().environment("CartPole-v1").framework("torch")
    config.env_runners(num_cpus_per_env_runner=0.5).learners(num_learners=0)
    config.rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh"))
    config.debugging(seed=1, log_level="ERROR").reporting(min_time_s_per_iteration=1)
    algorithm = config.build_algo()
    first = None
    while True:
        result = algorithm.train().get("env_runners", {})
        steps, now = int(result.get(STEPS, 0)), time.perf_counter()
        if first is None and steps >= args.warm_up:
            first = steps, now
        elif first is not None and steps >= first[0] + args.steps:
            break
    rate = (steps - first[0]) / (now - first[1])
    algorithm.stop()
    ray.shutdown()
    versions = {"ray": ray.__version__, "torch": torch.__version__}
    print(
        json.dumps(
            {"steps_per_second": rate, "episode_return": result.get("episode_return_mean"), "versions": versions}
        )
    )


if __name__ == "__main__":
    main()
