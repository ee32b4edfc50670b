"""SBX's SAC on HalfCheetah-v4: Stable-Baselines3's loop with jitted updates in JAX. Prints one JSON object.

    python sbx_sac.py --steps 6000 --warm-up 1500

One Gymnasium environment, an update of 256 transitions per step, two layers of 256 in policy and critics.
"""

import argparse
import json
import time

import gymnasium
import jax
import sbx
from stable_baselines3.common.callbacks import BaseCallback

LEARNING_STARTS, BATCH = 1_000, 256


class Meter(BaseCallback):
    """Starts the clock after the warm-up."""

    def __init__(self, warm_up):
        super().__init__()
        self.warm_up, self.clock = warm_up, None

    def _on_step(self):
        if self.clock is None and self.num_timesteps > self.warm_up:
            self.clock = time.time()
        return True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True, help="environment steps to run")
    parser.add_argument("--warm-up", type=int, required=True, help="steps before the clock starts, included in --steps")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    env = gymnasium.make("HalfCheetah-v4")
    layers = {"net_arch": [256, 256]}
    model = sbx.SAC(
        "MlpPolicy", env, seed=args.seed, learning_starts=LEARNING_STARTS, batch_size=BATCH, train_freq=1,
        gradient_steps=1, learning_rate=3e-4, gamma=0.99, tau=0.005, ent_coef="auto", policy_kwargs=layers,
    )  # fmt: skip
    meter = Meter(args.warm_up)
    model.learn(args.steps, callback=meter)
    jax.block_until_ready(model.policy.qf_state.params)
    rate = (args.steps - args.warm_up - 1) / (time.time() - meter.clock)
    versions = {"sbx": sbx.__version__, "jax": jax.__version__, "gymnasium": gymnasium.__version__}
    print(json.dumps({"steps": args.steps, "steps_per_second": rate, "versions": versions}))


if __name__ == "__main__":
    main()
