"""Run PureJaxRL's PPO unchanged, from a checkout of PureJaxRL, and time it. Print one JSON object.

    python purejaxrl_ppo.py PUREJAXRL_DIR --num-envs 4 --steps 500000

The whole training is one jitted call. It is compiled first, and then executed.
"""

import argparse
import json
import sys
import time
import types
from importlib import metadata
from pathlib import Path


def install_unused_modules():
    """Install empty modules in place of brax and navix, which PureJaxRL's wrappers import, but its PPO does not use."""
    for name in ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["brax"].envs = sys.modules["brax.envs"]
    training = sys.modules["brax.envs.wrappers.training"]
    training.EpisodeWrapper = training.AutoResetWrapper = object


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("purejaxrl", type=Path)
    parser.add_argument("--num-envs", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    sys.path.insert(0, str(args.purejaxrl.resolve() / "purejaxrl"))
    install_unused_modules()
    import jax
    import numpy as np
    from ppo import make_train

    config = {
        "ENV_NAME": "CartPole-v1",
        "NUM_ENVS": args.num_envs,
        "NUM_STEPS": 128,
        "TOTAL_TIMESTEPS": args.steps,
        "UPDATE_EPOCHS": 4,
        "NUM_MINIBATCHES": 4,
        "ACTIVATION": "tanh",
        "LR": 2.5e-4,
        "ANNEAL_LR": True,
        "GAMMA": 0.99,
        "GAE_LAMBDA": 0.95,
        "CLIP_EPS": 0.2,
        "ENT_COEF": 0.01,
        "VF_COEF": 0.5,
        "MAX_GRAD_NORM": 0.5,
        "DEBUG": False,
    }
    rng = jax.block_until_ready(jax.random.PRNGKey(args.seed))
    began = time.perf_counter()
    train = jax.jit(make_train(config)).lower(rng).compile()
    compiled, processor = time.perf_counter(), time.process_time()
    metrics = jax.block_until_ready(train(rng))["metrics"]
    seconds, processor = time.perf_counter() - compiled, time.process_time() - processor
    steps = metrics["returned_episode"].size
    late = slice(len(metrics["returned_episode"]) * 9 // 10, None)  # the last tenth of the updates
    ended = np.asarray(metrics["returned_episode"][late])
    packages = ("jax", "flax", "optax", "distrax", "gymnax", "numpy")
    result = {
        "steps_per_second": steps / seconds,
        "steps": steps,
        "processor_us": 1e6 * processor / steps,
        "compile_seconds": compiled - began,
        "return": float(np.asarray(metrics["returned_episode_returns"][late])[ended].mean()),
        "versions": {name: metadata.version(name) for name in packages},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
