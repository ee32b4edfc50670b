"""Run one of CleanRL's scripts unchanged, from a checkout of CleanRL, and time it. Print one JSON object.

    python cleanrl_script.py CLEANRL_DIR dqn_jax --line-steps 100 --skip-lines 20 -- --total-timesteps 20000

CleanRL prints a line that starts with `SPS:` every `--line-steps` environment steps. The rate is computed from the
times of these lines. The first `--skip-lines` lines are skipped, which excludes imports, compilation and warm-up.
"""

import argparse
import json
import os
import runpy
import sys
import tempfile
import time
import types
from importlib import metadata
from pathlib import Path


class LineTimes:
    """A stand-in for stdout that records the time of each `SPS:` line and discards all output."""

    def __init__(self):
        self.times = []

    def write(self, text):
        if text.startswith("SPS:"):
            self.times.append(time.perf_counter())
        return len(text)

    def flush(self):
        pass


def install_old_gym():
    """Install the Gym API of 2021 for `ppo_atari_envpool.py`. EnvPool's wheels for Python 3.11 no longer support it.

    This adds a module `gym` with the two names that the script uses, and an `envpool.make` with the old API.
    """
    import envpool
    import gymnasium
    import numpy as np

    class OldPool:
        def __init__(self, task, env_type, **options):
            del env_type
            self.pool = envpool.make_gymnasium(task, **options)
            self.observation_space, self.action_space = self.pool.observation_space, self.pool.action_space

        def reset(self):
            return self.pool.reset()[0]

        def step(self, action):
            observation, reward, terminated, truncated, info = self.pool.step(action.astype(np.int32))
            info.setdefault("reward", reward)
            info["terminated"] = np.asarray(info.get("terminated", terminated))
            return observation, reward, terminated | truncated, info

        def close(self):
            del self.pool  # EnvPool's close() fails with older versions of Gymnasium

    class Wrapper:
        def __init__(self, env):
            self.env = env

        def __getattr__(self, name):
            return getattr(self.env, name)

        def reset(self, **kwargs):
            return self.env.reset(**kwargs)

        def step(self, action):
            return self.env.step(action)

    gym = types.ModuleType("gym")
    gym.Wrapper, gym.spaces = Wrapper, gymnasium.spaces
    sys.modules["gym"] = gym
    # The script's `import envpool` then imports a module with the old `make`.
    old = types.ModuleType("envpool")
    old.make = OldPool
    sys.modules["envpool"] = old


def version_of(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main():
    separator = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, script_args = sys.argv[1:separator], sys.argv[separator + 1 :]
    parser = argparse.ArgumentParser()
    parser.add_argument("cleanrl", type=Path)
    parser.add_argument("script", help="name of a file in cleanrl/, without .py")
    parser.add_argument("--line-steps", type=int, required=True, help="environment steps between two SPS lines")
    parser.add_argument("--skip-lines", type=int, default=1, help="lines to skip as warm-up")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 uses torch's default")
    args = parser.parse_args(own)
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    if "envpool" in args.script:
        install_old_gym()
    sys.path.insert(0, str(args.cleanrl.resolve()))
    path = args.cleanrl.resolve() / "cleanrl" / f"{args.script}.py"
    sys.argv = [str(path), *script_args]
    line_times, stdout = LineTimes(), sys.stdout
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)  # the script writes runs/ to the current directory
        sys.stdout = line_times
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            sys.stdout = stdout
            os.chdir("/")
    times = line_times.times[args.skip_lines :]
    steps = (len(times) - 1) * args.line_steps
    packages = ("torch", "jax", "flax", "gymnasium", "envpool", "numpy")
    result = {
        "steps_per_second": steps / (times[-1] - times[0]),
        "steps": steps,
        "versions": {name: version_of(name) for name in packages},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
