"""`rlframe bench [NAME...]` runs the benchmarks and prints their tables."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import against
from benchmarks.context import Context
from benchmarks.report import Table, machine
from rlframe import extras
from rlframe.errors import UsageError

# name -> description. Each is a module in this package with `run(context, log) -> list[Table]`.
BENCHMARKS = {
    "startup": "the seconds of a short `rlframe train`, of its imports and of its compilation",
    "actor": "time profile of an Actor's step",
    "envs": "environment pools, against gymnasium's AsyncVectorEnv",
    "async_envs": "AsyncEnv against SyncEnv with very uneven step times",
    "replay": "insert and sample, against Stable-Baselines3, cpprb and flashbax",
    "inference": "the inference service, against its jitted call alone and against unbatched calls",
    "calls": "a call to another process, against Courier and the standard library's connections",
    "engines": "programs of several processes under each engine",
    "scaling": "a model of programs of 1 to 1,000 actors, against a simulation of them",
    "shared_memory": "replay between processes, against the in-process buffer",
    "replay_service": "the replay service, against Reverb",
    "reverb": "Reverb through rlframe's buffer, against Reverb alone; shared memory against its inserts",
    "ppo_cartpole": "PPO on CartPole-v1, against a bare loop, Stable-Baselines3 and CleanRL",
    "dqn_cartpole": "DQN on CartPole-v1, against CleanRL",
    "fused": "PPO and DQN on CartPole-v1 in one jitted call, against PureJaxRL and single_process",
    "sac_halfcheetah": "SAC on HalfCheetah-v4, against a bare loop of the same update",
    "learner": "a Learner's updates on one device and on several (--devices 1,2)",
    "r2d2": "R2D2's learner on replayed sequences, against its jitted update alone",
    "ppo_pong": "PPO on Pong-v5, against CleanRL and Stable-Baselines3",
    "impala_pong": "IMPALA on Pong-v5 with two actors, against its parts alone on the same cores",
    "lm": "a language model's decode engine and learner, against their jitted steps alone",
    "trajectories": "the trajectory service on disk, against the published server in memory",
    "coordinator": "200 scripted workers on one coordinator",
}
NEEDS = {  # name -> required extras
    "replay_service": ("reverb",),
    "reverb": ("reverb",),
    "lm": ("trajectories",),
    "trajectories": ("trajectories",),
}


def main(arguments: Sequence[str] = ()) -> int:
    """Run the benchmarks named in `arguments`, or all.

    Returns:
        0: all targets are reached, or with `--against`, no row is slower. 1: a target is missed, or a row is slower. 2:
            unknown name or option.

    Raises:
        UsageError: a named benchmark needs a missing extra. Without names, such a benchmark is left out.
    """
    args = _arguments(arguments)
    unknown = [name for name in args.names if name not in BENCHMARKS]
    if unknown:
        print(
            f"rlframe bench: there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}.", file=sys.stderr
        )
        return 2
    if args.list:
        print("\n".join(f"{name:16}{text}" for name, text in BENCHMARKS.items()))
        return 0
    names = [name for name in args.names or BENCHMARKS if _can_run(name, bool(args.names))]
    if args.against is not None:
        return _against(args, names)
    context = Context(
        peers_python=_path(args.peers_python, "RLFRAME_PEERS_PYTHON"),
        cleanrl=_path(args.cleanrl, "RLFRAME_CLEANRL"),
        purejaxrl=_path(args.purejaxrl, "RLFRAME_PUREJAXRL"),
        purejaxrl_python=_path(args.purejaxrl_python, "RLFRAME_PUREJAXRL_PYTHON"),
        devices=tuple(map(int, args.devices.split(","))),
        repeats=1 if args.quick else args.repeats,
        quick=args.quick,
    )
    print(machine(), flush=True)
    found: dict[str, list[Table]] = {}
    for name in names:
        found[name] = importlib.import_module(f"benchmarks.{name}").run(context, _log)
        print("", *found[name], sep="\n\n" if len(found[name]) > 1 else "\n", flush=True)
    code = _sum_up([table for tables in found.values() for table in tables])
    if args.json:
        print(json.dumps(_as_json(found)))
    return code


def _as_json(found: Mapping[str, list[Table]]) -> dict[str, Any]:
    tables = {name: [dataclasses.asdict(table) for table in tables] for name, tables in found.items()}
    return {"date": datetime.date.today().isoformat(), "machine": machine(), "benchmarks": tables}


def _can_run(name: str, is_named: bool) -> bool:
    try:
        extras.require(f"rlframe bench {name}", *NEEDS.get(name, ()))
    except UsageError as error:
        if is_named:
            raise
        print(f"Left out: {error}", file=sys.stderr)
        return False
    return True


def _against(args: argparse.Namespace, names: list[str]) -> int:
    print(machine(), flush=True)
    try:
        python = args.old_python or sys.executable
        return against.run(names, args.against, args.turns or 5, args.quick, args.json, _log, python)
    except UsageError as error:
        print(f"rlframe bench: {error}", file=sys.stderr)
        return 2


def _sum_up(tables: list[Table]) -> int:
    missed = [line for table in tables for line in table.missed_targets()]
    unmeasured = sum(row.value is None for table in tables for row in (table.ours, *table.others))
    if not tables:
        return 0
    print()
    if unmeasured:
        print(f"{unmeasured} figures were not measured. To set up the peers, see benchmarks/README.md.")
    print(*(["Missed targets:", *missed] if missed else ["All measured targets are reached."]), sep="\n  ")
    return 1 if missed else 0


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rlframe bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument("--peers-python", help="Python of an environment with the peers")
    parser.add_argument("--cleanrl", help="a checkout of CleanRL")
    parser.add_argument("--purejaxrl", help="a checkout of PureJaxRL")
    parser.add_argument("--purejaxrl-python", help="Python of an environment with PureJaxRL's libraries")
    parser.add_argument("--devices", default="1,2", help="numbers of devices for the benchmark `learner`")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each contender; tables show medians")
    parser.add_argument("--quick", action="store_true", help="one short turn, to check that everything runs")
    parser.add_argument("--against", metavar="CHECKOUT", help="compare with another checkout, or a git revision")
    parser.add_argument("--turns", type=int, help="with --against: turns of old, new and old again (default: 5)")
    parser.add_argument("--old-python", help="with --against: Python for the old checkout")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args(list(arguments))
    if args.against is None and (args.turns is not None or args.old_python):
        parser.error("--turns and --old-python require --against.")
    peers = ("peers_python", "cleanrl", "purejaxrl", "purejaxrl_python")
    if args.against is not None and (given := [name for name in peers if getattr(args, name)]):
        option = f"--{given[0].replace('_', '-')}"
        parser.error(f"--against does not measure peers, so it cannot be combined with {option}.")
    if args.turns is not None and args.turns < 1:
        parser.error(f"--turns must be at least 1, got {args.turns}.")
    return args


def _path(option: str | None, variable: str) -> Path | None:
    given = option or os.environ.get(variable)
    return Path(given) if given else None


def _log(text: str) -> None:
    print(f"  {text} ...", file=sys.stderr, flush=True)
