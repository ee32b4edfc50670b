"""Load runs from their directories, and compute learning curves: averages over runs that differ only in their seed.

The average is the interquartile mean, with a bootstrap confidence interval: Agarwal et al. 2021, "Deep Reinforcement
Learning at the Edge of the Statistical Precipice" (arXiv:2108.13264). The interquartile mean is the mean of the middle
half of the runs. Outliers affect it less than the mean, and it uses more runs than the median.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rlframe.errors import UsageError
from rlframe.metrics.files import read_jsonl

Over = Literal["steps", "seconds"]  # x axis: environment steps, or wall time of the session

CONFIDENCE = 0.95
# With fewer runs, use the mean of all runs, and an interval from the lowest to the highest value.
MIN_RUNS_FOR_IQM = 4
_RESAMPLES = 2_000
_GRID_POINTS = 400

Config = Mapping[str, Any]  # flat config of an experiment: "agent_config.learning_rate" -> 0.001

_PLAIN = re.compile(r"[\w.+/:-]+")  # strings that match this pattern need no quotes in labels
_MOST_FOLDERS = 3  # a shortened path in a label has fewer folders than this number


@dataclasses.dataclass(frozen=True)
class RunCurve:
    """The returns of one run, loaded from its directory."""

    agent: str
    env: str
    config: dict[str, Any]  # flat config of the experiment, without the seed
    steps: np.ndarray  # [n] x values: environment steps, or seconds of wall time
    returns: np.ndarray  # [n] float64, mean return of the episodes that ended since the previous row
    episodes: np.ndarray  # [n] float64, number of episodes in each mean of `returns`
    evaluated_steps: np.ndarray  # [m] x values of the evaluations
    evaluated_returns: np.ndarray  # [m] float64, mean returns of the evaluations


@dataclasses.dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in their seed."""

    label: str
    env: str
    runs: tuple[RunCurve, ...]

    def curve(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return (steps, mean, low, high), each [n]: the average curve and its confidence interval.

        `mean` is the interquartile mean of the smoothed returns. With fewer than four seeds, it is the mean of all, and
        `low` and `high` are the lowest and highest values. The curve ends where the shortest run ends, so that every
        point is an average of the same runs.
        """
        with_rows = [run for run in self.runs if len(run.steps)]
        if not with_rows:
            return np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0)
        if len(with_rows) == 1:
            run = with_rows[0]
            alone = smoothed(run.returns, run.episodes)
            return run.steps, alone, alone, alone
        start = max(run.steps[0] for run in with_rows)
        end = min(run.steps[-1] for run in with_rows)
        grid = np.linspace(start, max(start, end), _GRID_POINTS)
        each = np.stack([np.interp(grid, run.steps, smoothed(run.returns, run.episodes)) for run in with_rows])
        return grid, interquartile_mean(each), *interval(each)

    def evaluations(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return (steps, mean, low, high) of the evaluations, each [m]: as `curve`, but without smoothing.

        Evaluations of several seeds at almost the same step become one point. The steps of seeds differ slightly,
        because an evaluation starts only when a batch of steps is complete.
        """
        steps = np.concatenate([run.evaluated_steps for run in self.runs])
        returns = np.concatenate([run.evaluated_returns for run in self.runs])
        point = _points(steps, [run.evaluated_steps for run in self.runs])
        each = [point == index for index in range(point.max(initial=-1) + 1)]
        ends = [interval(returns[chosen]) for chosen in each]
        return (
            np.array([steps[chosen].mean() for chosen in each]),
            np.array([interquartile_mean(returns[chosen]) for chosen in each]),
            *np.array(ends).reshape(-1, 2).T,
        )


def _points(steps: np.ndarray, of_runs: Sequence[np.ndarray]) -> np.ndarray:
    """Assign each of the n steps to a point of the plot. Return the indices [n] of the points.

    If all runs have the same number of steps, point i has the i-th step of each run. Otherwise, or if these differ
    too much, steps that are close together share a point. They are close if their distance is at most half of the
    smallest distance between two steps of the same run.
    """
    if not len(steps):
        return np.zeros(0, np.int64)
    evaluated = [own for own in of_runs if len(own)]
    if len({len(own) for own in evaluated}) == 1:
        low, high = np.min(evaluated, axis=0), np.max(evaluated, axis=0)
        if (high[:-1] < low[1:]).all() and (low >= 0.75 * high).all():
            return np.tile(np.arange(len(low)), len(evaluated))
    distances = [np.diff(own).min() for own in of_runs if len(own) > 1]
    apart = min(distances) / 2 if distances else 0.01 * steps.max()
    at = np.unique(steps)
    index = np.concatenate([[0], np.cumsum(np.diff(at) > apart)])
    return index[np.searchsorted(at, steps)]


def load_run(directory: str | os.PathLike[str], over: Over = "steps") -> RunCurve:
    """Load a run from `metrics.jsonl` and, if it exists, `config.json`.

    Raises:
        UsageError: The directory has no `metrics.jsonl`.
    """
    directory = pathlib.Path(directory)
    try:
        rows = read_jsonl(directory / "metrics.jsonl")
    except OSError as error:
        raise UsageError(
            f"{directory} has no metrics.jsonl ({error.strerror}). Give the directory of a run."
        ) from error
    # If there is no config, use the directory as the config, so that this run is not grouped with other runs.
    experiment = _read_experiment(directory / "config.json") or {"directory": str(directory.resolve())}
    at = _positions(rows, over)
    trained = [i for i, row in enumerate(rows) if row.get("episode_return") is not None]
    evaluated = [i for i, row in enumerate(rows) if row.get("return_mean") is not None]
    return RunCurve(
        agent=_plain(experiment["agent"]) if "agent" in experiment else directory.resolve().name,
        env=_plain_env(experiment.get("env", "")),
        config=experiment,
        steps=at[trained],
        returns=np.array([rows[i]["episode_return"] for i in trained], np.float64),
        episodes=np.array([rows[i].get("episodes") or 1 for i in trained], np.float64),
        evaluated_steps=at[evaluated],
        evaluated_returns=np.array([rows[i]["return_mean"] for i in evaluated], np.float64),
    )


def _positions(rows: Sequence[dict[str, Any]], over: Over) -> np.ndarray:
    """Return the x value [n] of each row: int64 steps or float64 seconds.

    `wall_seconds` starts at 0 in each session, so add the times of the earlier sessions. If a row has no time, use the
    time of the previous row.
    """
    if over == "steps":
        return np.array([row["step"] for row in rows], np.int64)
    seconds, before, newest = [], 0.0, 0.0
    for row in rows:
        in_session = row.get("wall_seconds", newest)
        before += newest if in_session < newest else 0.0
        newest = in_session
        seconds.append(before + newest)
    return np.array(seconds, np.float64)


def group_runs(runs: Sequence[RunCurve]) -> list[SeedGroup]:
    """Group runs that differ only in their seed. Label each group with the options that distinguish it."""
    grouped: dict[str, list[RunCurve]] = {}
    for run in runs:
        key = json.dumps([run.agent, run.env, run.config], sort_keys=True, default=str)
        grouped.setdefault(key, []).append(run)
    groups = list(grouped.values())
    named: dict[int, str] = {}
    for agent, env in {
        (members[0].agent, members[0].env) for members in groups
    }:  # compare only groups that have the same agent and environment
        alike = [i for i, (run, *_) in enumerate(groups) if (run.agent, run.env) == (agent, env)]
        for i, text in zip(alike, labels([groups[i][0].config for i in alike]), strict=True):
            named[i] = f"{agent} ({text})" if text else agent
    return [SeedGroup(named[i], members[0].env, tuple(members)) for i, members in enumerate(groups)]


def smoothed(returns: np.ndarray, episodes: np.ndarray) -> np.ndarray:
    """Return a running mean of `returns` [n], weighted by `episodes` [n]. The window is 2 % of the curve."""
    half = max(1, len(returns) // 100)
    index = np.arange(len(returns))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(returns))
    total = np.concatenate([[0.0], np.cumsum(returns * episodes)])
    weight = np.concatenate([[0.0], np.cumsum(episodes)])
    return (total[high] - total[low]) / np.maximum(weight[high] - weight[low], 1e-12)


def statistic(count: int) -> str:
    """Return the name of the average and the interval of `count` runs, at least 2: `interquartile_mean`, `interval`."""
    return f"IQM and {CONFIDENCE:.0%} interval" if count >= MIN_RUNS_FOR_IQM else "mean, lowest to highest"


def interquartile_mean(values: Any, axis: int = 0) -> np.ndarray:
    """Return the mean over the middle half of `values` along `axis`, or over all if n < MIN_RUNS_FOR_IQM.

    n is the length of `axis`.
    """
    from scipy import stats

    return np.asarray(stats.trim_mean(values, 0.25, axis=axis))


def interval(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends (low [...], high [...]) of a 95% confidence interval of the interquartile mean.

    Percentile bootstrap over the n runs of `values` [n, ...]. If n < MIN_RUNS_FOR_IQM, return the lowest and highest
    values. The same values always give the same interval.
    """
    values = np.asarray(values, np.float64)
    if len(values) < MIN_RUNS_FOR_IQM:
        return values.min(axis=0), values.max(axis=0)
    drawn = np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))
    # Compute the means in parts of 8 MB, because all resamples of long curves together need gigabytes of memory.
    parts = np.array_split(drawn, -(-drawn.size * values[0].size // 1_000_000))
    means = np.concatenate([interquartile_mean(values[part], axis=1) for part in parts])
    tail = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.percentile(means, [tail, 100.0 - tail], axis=0)
    return low, high


def _read_experiment(path: pathlib.Path) -> dict[str, Any]:
    try:
        experiment = json.loads(path.read_text())["experiment"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    experiment.pop("seed", None)
    return _flat(experiment)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            result.update(_flat(value, f"{prefix}{name}."))
        else:
            result[prefix + name] = _whole(value)
    return result


def _whole(value: Any) -> Any:
    """Convert floats such as 1.0 to int, because 1.0 and 1 are the same setting."""
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def run_name(agent: str, env: str) -> str:
    """Return, for example, `PPO on CartPole-v1` for `ppo` and `gymnasium:CartPole-v1`."""
    return f"{_plain(agent)} on {_plain_env(env)}"


def _plain(name: str) -> str:
    """Return `PPO` for `ppo`, `Reinforce` for `/path/file.py:Reinforce`."""
    name = name.rpartition(":")[2]
    return name.upper() if name.islower() and len(name) <= 4 else name


def _plain_env(name: str) -> str:
    """Return `CartPole-v1` for `gymnasium:CartPole-v1`, `file.py:make_env` for `/path/file.py:make_env`."""
    return pathlib.Path(name).name if ".py:" in name else name.rpartition(":")[2]


# --- labels: the options that distinguish a run from the other runs in a plot


def labels(configs: Sequence[Config]) -> list[str]:
    """Return a label for each config, such as `learning_rate 0.001, topology heavy_env`.

    A label lists the options whose values differ between the configs. If an option exists only for one topology,
    network or agent, the label shows the name of the topology, network or agent instead of this option.

    Args:
        configs: n different configs.

    Returns:
        n different texts. At most one of them is empty.
    """
    names = sorted({name for config in configs for name in config})
    shown = _option_names(names)
    texts: dict[str, dict[str, str]] = {}
    for name in names:
        if _differs(name, configs):
            texts[name] = _value_texts([config[name] for config in configs if name in config])
    return [
        ", ".join(f"{shown[name]} {text[repr(config[name])]}" for name, text in texts.items() if name in config)
        for config in configs
    ]


def _differs(name: str, configs: Sequence[Config]) -> bool:
    """Return True if the values of an option differ, or if some config lacks the option but could have it."""
    having = [config for config in configs if name in config]
    if len({repr(config[name]) for config in having}) > 1:
        return True
    lacking = [config for config in configs if name not in config]
    chooser = _chooser(name, configs)
    if chooser is None:
        return bool(lacking)
    chosen = {repr(config.get(chooser)) for config in having}
    return any(repr(config.get(chooser)) in chosen for config in lacking)


def _chooser(name: str, configs: Sequence[Config]) -> str | None:
    """Return the option that decides whether `name` is an option, or None if any config can have `name`.

    For example, the agent decides whether `agent_config.learning_rate` is an option.
    """
    if "env_kwargs." in name:
        return None
    part = f"{name.rpartition('.')[0]}.name"  # `agent_config.head.name` for `agent_config.head.num_atoms`
    if part != name and name.startswith("agent_config.") and any(part in config for config in configs):
        return part
    chosen_by = {"topology.network_config": "topology.network", "topology.": "topology.name", "agent_config.": "agent"}
    return next((chooser for prefix, chooser in chosen_by.items() if name.startswith(prefix)), None)


def _option_names(names: Iterable[str]) -> dict[str, str]:
    """Map each name to its shortest unique form: `hidden`, `network.hidden` or the full name."""
    forms = {name: _short_forms(name) for name in names}
    counts = collections.Counter(form for each in forms.values() for form in dict.fromkeys(each))
    return {name: next((form for form in each if counts[form] == 1), name) for name, each in forms.items()}


def _short_forms(name: str) -> tuple[str, ...]:
    option = name.removesuffix(".name").replace("topology.network_config.", "network.")
    option = option.removeprefix("topology.").removeprefix("agent_config.")
    return option.rpartition(".")[2], option, name


def _value_texts(values: Sequence[Any]) -> dict[str, str]:
    """Map the `repr` of each value to a short text that differs from the texts of all other values."""
    every = {repr(value): value for value in values}
    for folders in range(_MOST_FOLDERS):
        texts = {key: _short(value, folders) for key, value in every.items()}
        if len(set(texts.values())) == len(texts):
            return texts
    return {key: key for key in every}


def _short(value: Any, folders: int) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        is_path = value.startswith("/")
        text = "/".join(pathlib.Path(value).parts[-1 - folders :]) if is_path else value
        return text if _PLAIN.fullmatch(text) else repr(text)
    return str(value)
