"""Test commands with only the core or one extra installed: each command works, or names the missing extra."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys

import pytest

from rlframe import extras
from rlframe.cli.main import COMMANDS
from rlframe.cli.serve import SERVICES
from rlframe.errors import UsageError
from rlframe.programs.options import registry
from rlframe.programs.options.make_experiment import make_experiment
from tests import hiding
from tests.extras import NOT_IN_ALL, needs

GRPO = f"train --quiet --agent grpo --env {hiding.ROOT}/examples/llm/reverse.py:Reverse --steps 1"


@dataclasses.dataclass(frozen=True)
class Call:
    """A command line and the extras that it needs.

    Attributes:
        line: the command without the word `rlframe`, or `import MODULE NAME`.
        by: option or feature that needs the extras, as named in the message.
        needs: the required extras.
        otherwise: the message ends with this text if only the last extra is missing.
    """

    line: str
    by: str = ""
    needs: tuple[str, ...] = ()
    otherwise: str = ""

    def __str__(self) -> str:
        return self.line.replace(str(hiding.ROOT), "")


def of_command(line: str, *needs: str) -> Call:
    return Call(line, "rlframe " + line.partition(" -")[0], needs)


def training(options: str, *needs: str, by: str = "", otherwise: str = "") -> Call:
    return Call(f"train --quiet --steps 64 --num-envs 2 --unroll-length 8 {options}", by or options, needs, otherwise)


NO_CONTROL = "or turn the HTTP service off with --http None"
TOPOLOGIES = [
    training("--topology heavy_env"),
    training("--topology light_env"),
    training("--topology heavy_env --engine launchpad", "launchpad", by="--topology heavy_env"),
    training("--topology light_env --engine launchpad", "launchpad", by="--topology light_env"),
    training("--topology distributed"),
    training("--topology distributed --engine launchpad", "launchpad", "reverb", by="--topology distributed"),
    training("--topology elastic", "trajectories", otherwise=NO_CONTROL),
    training("--topology elastic --http None"),
    training("--topology heavy_env --replay reverb", "reverb"),
    training("--topology light_env --replay reverb", "reverb"),
    training("--topology distributed --replay reverb", "reverb"),
    training("--topology elastic --replay reverb", "reverb", "trajectories", otherwise=NO_CONTROL),
    training("--topology distributed --engine threads"),
    training("--topology fused --env jax:CartPole-v1", by="--topology fused"),
    training(
        "--topology heavy_env --replay reverb --engine threads", "reverb", by="--topology heavy_env --replay reverb"
    ),
]
TRAINING = [
    *TOPOLOGIES,
    training(
        "--env dm_control:cartpole-balance --num-minibatches 2", "dm_control", by="--env dm_control:cartpole-balance"
    ),
    training("--env gymnax:CartPole-v1 --topology fused", "gymnax", by="--env gymnax:CartPole-v1"),
    training("--env jumanji:Snake-v1", "jumanji", by="--env jumanji:Snake-v1"),
    training("--http 0", "trajectories", by="--http"),
    training("--wandb", "wandb"),
    training("--trackio", "trackio"),
    Call(f"{GRPO} --supervised-steps 0", "--agent grpo", ("trajectories", "envs")),
    Call(f"{GRPO} --supervised-steps 0 --engine launchpad", "--agent grpo", ("launchpad", "trajectories", "envs")),
    Call(
        f"{GRPO} --supervised-steps 1",
        *("--agent grpo", ("trajectories", "envs", "lm")),
    ),
]
OTHERS = [
    Call("evaluate RUN --video RUN/film.mp4", "--video", ("gymnasium",)),
    of_command("sweep --vary learning-rate=1e-3,1e-2", "sweep"),
    *(
        of_command(f"{command} --url http://localhost:1", "trajectories")
        for command in ("status", "pause", "unpause", "stop")
    ),
    of_command("scale --url http://localhost:1 collector 2", "trajectories"),
    of_command("serve trajectories --store memory", "trajectories"),
    of_command("serve trajectories --store redis://localhost:1/0", "trajectories"),
    Call("serve trajectories --store memory --tokenizer t.json", "--tokenizer", ("trajectories", "tokenizers")),
    Call("serve policy FOLDER", "rlframe serve policy", ("trajectories", "lm")),
    of_command("serve policy --run-dir RUN", "trajectories"),
    Call("bench reverb", "rlframe bench reverb", ("reverb",)),
    Call("bench trajectories", "rlframe bench trajectories", ("trajectories",)),
]
IMPORTS = [
    Call("import rlframe.trajectories TrajectoryClient", "rlframe.trajectories.TrajectoryClient", ("trajectories",)),
    Call("import rlframe.trajectories TrajectoryBuffer", "rlframe.trajectories.TrajectoryBuffer", ("trajectories",)),
    Call("import rlframe.language BaseEnv", "BaseEnv", ("trajectories", "envs")),
    Call("import rlframe.language PolicyServer", "PolicyServer", ("trajectories",)),
    Call("import rlframe.language.model.published_tokenizer", "A published tokenizer", ("lm",)),
    Call("import rlframe.engines.ray_nodes.cluster RayCluster", "--engine ray", ("ray",)),
]
CORE = [
    *(Call(f"{command} --help") for command in COMMANDS),
    *(Call(f"serve {service} --help") for service in SERVICES),
    Call("train --quiet --steps 64 --num-envs 2 --unroll-length 8 --run-dir RUN"),
    Call("evaluate RUN --episodes 1"),
    Call("plot RUN"),
    Call("envs CartPole"),
    Call("agents"),
    Call("check-env CartPole-v1 --num-envs 64 --seconds 0.1"),
    Call("doctor"),
    Call("bench --list"),
    *(
        Call(f"import rlframe.{package}")
        for package in (
            *(
                "actors",
                "agents",
                "coordinator",
                "envs",
                "inferencers",
                "interprocess",
                "language",
                "learners",
                "metrics",
            ),
            *("language.decoding", "language.model", "programs", "replay", "replay.reverb", "trajectories"),
        )
    ),
]
REFUSED = [call for call in (*TRAINING, *OTHERS, *IMPORTS) if call.needs]
AVAILABLE = [extra for extra in extras.MODULES if extras.has_wheel(extra) and extra not in NOT_IN_ALL]


def expected(call: Call, installed: set[str]) -> str | None:
    """Return the error message for the missing extras of a call. Return None if no extra is missing."""
    absent = [extra for extra in call.needs if extra not in installed]
    if not absent:
        return None
    otherwise = call.otherwise if absent == [call.needs[-1]] else ""
    return str(extras.missing_extra_error(call.by, *absent, otherwise=otherwise))


def installed_with(*names: str) -> set[str]:
    """Return the extras whose packages are all installed if the given extras are installed. Some share packages."""
    there = hiding.visible(names)
    return {extra for extra, modules in extras.MODULES.items() if there.issuperset(modules)}


def made(calls: dict[str, list[Call]], folder) -> dict[str, list[tuple[int, str]]]:
    """Run the calls of each extra in a process in which only this extra is installed ("" means no extra)."""
    asked = {
        extra: {
            "hidden": hiding.environment(*filter(None, [extra]))["RLFRAME_HIDDEN"].split(),
            "calls": [call.line.split() for call in of_extra],
        }
        for extra, of_extra in calls.items()
    }
    done = subprocess.run(
        [sys.executable, str(hiding.FOLDER / "calls.py")],
        input=json.dumps(asked),
        env=hiding.environment(),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_topology_and_replay_has_a_test_case():
    tried = {call.by for call in TOPOLOGIES}
    for topology, replay in itertools.product(registry.TOPOLOGIES["steps"], ("auto", *registry.REPLAYS)):
        if topology == "single_process":  # This topology needs no extra.
            continue
        try:
            make_experiment(topology=topology, replay=replay)
        except UsageError:  # The topology does not support this replay service.
            continue
        assert f"--topology {topology}{' --replay reverb' if replay == 'reverb' else ''}" in tried


@pytest.mark.system
def test_core_runs_commands_without_extras_and_names_the_missing_extras_of_other_commands(tmp_path):
    calls = [*CORE, *REFUSED]
    results = made({"": calls}, tmp_path)[""]
    for call, (code, said) in zip(calls, results):
        sentence = expected(call, installed_with())
        if sentence is None:
            assert (call.line, code) == (call.line, 0), said
        else:
            assert (call.line, code, said) == (call.line, 2, f"rlframe: {sentence}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["RUN"]  # The refused commands have created no files.


@pytest.mark.system
def test_missing_extras_are_named_with_one_required_extra_installed(tmp_path):
    calls = {
        extra: [call for call in REFUSED if extra in call.needs and expected(call, installed_with(extra))]
        for extra in AVAILABLE
    }
    check_refusals(calls, tmp_path)


@pytest.mark.system
def test_missing_extras_are_named_with_an_unrelated_extra_installed(tmp_path):
    calls = {
        extra: [call for call in REFUSED if extra not in call.needs and expected(call, installed_with(extra))]
        for extra in AVAILABLE
    }
    check_refusals(calls, tmp_path)


def check_refusals(calls: dict[str, list[Call]], folder) -> None:
    """Check that each call fails with the message for its missing extras, and creates no files."""
    for extra, results in made(calls, folder).items():
        for call, (code, said) in zip(calls[extra], results):
            assert (extra, call.line, code, said) == (
                *(extra, call.line, 2),
                f"rlframe: {expected(call, installed_with(extra))}\n",
            )
    assert list(folder.iterdir()) == []


@pytest.mark.system
@pytest.mark.parametrize(
    ("package", "topology", "by"),
    [
        ("launchpad", "heavy_env --engine launchpad", "--engine launchpad"),
        ("reverb", "distributed", "--replay reverb"),
    ],
)
def test_damaged_package_is_reported_before_the_run_directory_is_created(tmp_path, package, topology, by):
    needs("launchpad", "reverb")
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise AttributeError('module tensorflow has no attribute X')\n")
    arguments = training(f"--topology {topology} --run-dir run").line.split()
    done = subprocess.run(
        [sys.executable, "-m", "rlframe", *arguments],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"rlframe: {by} needs the package {package}, which is installed but cannot be imported: "
        "AttributeError: module tensorflow has no attribute X"
    )
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the directory of a finished run."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_for_real(
        "train --quiet --steps 64 --num-envs 2 --unroll-length 8 --eval-episodes 1 --run-dir run", folder.parent
    )
    return folder


def run_for_real(line: str, folder, *names: str) -> None:
    """Run a command with only the core and the given extras installed. Check that the command succeeds."""
    done = subprocess.run(
        [sys.executable, "-m", "rlframe", *line.split()],
        env={**hiding.environment(*names), "WANDB_MODE": "offline"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]


# Commands that must work if only the extras that docs/howto/extras.md names for them are installed.
WORKS = [
    *(call for call in TOPOLOGIES if "--replay reverb" not in call.line or "heavy_env" in call.line),
    training("--topology light_env --engine threads"),
    *(call for call in TRAINING if call.by in ("--wandb", "--trackio") or "dm_control" in call.by),
    Call(
        f"{GRPO} --supervised-steps 1",
        needs=("trajectories", "envs", "lm"),
    ),
    Call("evaluate RUN --episodes 1 --video film.mp4", needs=("gymnasium",)),
]


@pytest.mark.system
@pytest.mark.parametrize("call", WORKS, ids=str)
def test_extras_that_the_page_names_are_sufficient(tmp_path, trained, call):
    needs(*call.needs)
    run_for_real(call.line.replace("RUN", str(trained)), tmp_path, *call.needs)
