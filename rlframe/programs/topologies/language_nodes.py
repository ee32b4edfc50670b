"""Nodes of a language model's program: the environments, and the supervised warm-up."""

from __future__ import annotations

import asyncio
import json
import logging
import pathlib
import random
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from rlframe import handles
from rlframe.envs.adapters import env_seed
from rlframe.envs.group import ANSWER_TIMEOUT
from rlframe.errors import StoppedError, UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.interprocess.heartbeat import Phase, advance
from rlframe.language.environments import APIServerConfig, BaseEnv
from rlframe.language.environments.cli import override
from rlframe.language.environments.serving import ServeLoop
from rlframe.language.model import weights
from rlframe.language.model.tokenizers import load_tokenizer
from rlframe.language.warm_up import warm_up
from rlframe.metrics import MultiLogger
from rlframe.programs.options.object_names import load_object

if TYPE_CHECKING:
    from rlframe.programs.session import Session
    from rlframe.programs.topologies.language import Language

_COLLECTING = Phase("stepping", ANSWER_TIMEOUT)  # the launcher kills the node if its event loop is blocked longer

_log = logging.getLogger(__name__)

MODEL = "policy"  # name of the model in requests to the policy server

NO_LAST_STEP = 2**31 - 1  # the trainer registers this number of steps, but the monitor ends the run
_SET_BY_RUN = {  # option of an environment that users cannot set -> option of the run to use instead
    "tokenizer_name": "--tokenizer",
    "max_token_length": "--max-tokens",
    "rollout_server_url": "--service-port",
    "batch_size": "--batch-size",
    "total_steps": "--steps",
    "steps_per_eval": "--eval-every",
    "use_wandb": "--wandb",
    "resume_file": "the run directory",
}


def language_config(session: Session) -> Language:
    """Return the options of the topology. Use a cast, because this file cannot import `language.py`."""
    return cast("Language", session.topology_config)


def load_env_class(name: str) -> type[BaseEnv]:
    """Load an environment class by `file.py:Class` or `package.module:Class`.

    Raises:
        UsageError: The class is not a subclass of `BaseEnv`.
    """
    found = load_object(name, "environment")
    if not (isinstance(found, type) and issubclass(found, BaseEnv)):
        raise UsageError(f"A language model needs a subclass of rlframe.language.BaseEnv, but {name} is {found!r}.")
    return found


def env_config(env_cls: type[BaseEnv], session: Session, rank: int = 0, incarnation: int = 0) -> Any:
    """Return the config of one environment of a run.

    Raises:
        UsageError: `env_kwargs` contains an unknown option, an invalid value, or an option that the run sets.
    """
    experiment, config = session.experiment, session.experiment.agent_config
    for name in experiment.env_kwargs:
        if name in _SET_BY_RUN:
            raise UsageError(f"env_kwargs: the run sets {name}. Use {_SET_BY_RUN[name]} instead.")
    default, _ = env_cls.config_init()
    given: dict[str, Any] = {
        "tokenizer_name": language_config(session).tokenizer_name(config),
        "max_token_length": config.max_tokens,
        "rollout_server_url": language_config(session).service_url,
        "batch_size": config.batch_size,
        "total_steps": NO_LAST_STEP,
        "steps_per_eval": 0,  # the monitor requests evaluations
        "use_wandb": False,
        "resume_file": str(session.path / "environments" / f"{rank}.json"),
    }
    if "seed" in type(default).model_fields and "seed" not in experiment.env_kwargs:
        given["seed"] = env_seed(experiment.seed, rank, incarnation)
    return override(default, {}, {**given, **experiment.env_kwargs}, "env-kwargs.")


def check_environment(session: Session) -> None:
    """Raise UsageError if the run's environment or tokenizer is invalid. Call this before processes are started."""
    env_config(load_env_class(session.experiment.env), session)
    tokenizer = language_config(session).tokenizer_name(session.experiment.agent_config)
    tokens, known = load_tokenizer(tokenizer).vocab_size, session.agent.model_config.vocab_size  # type: ignore[attr-defined]
    if tokens > known:
        raise UsageError(f"The tokenizer {tokenizer} has {tokens} tokens, but the model has only {known}.")


class EnvironmentNode:
    """A node that collects groups of sequences for the learner, and evaluates the policy when the monitor requests it.

    A restarted node keeps its identity in the trajectory service, but gets a new seed and therefore other items.

    Args:
        session: The session.
        rank: Rank among the environments of the run.
    """

    def __init__(self, session: Session, rank: int) -> None:
        self._session, self._rank = session, rank
        self._incarnation = next_incarnation(session.path / "environments" / f"{rank}.incarnation")
        env_cls = load_env_class(session.experiment.env)
        self._metrics = RecentMetrics()
        self._env = env_cls(env_config(env_cls, session, rank, self._incarnation), [api_server_config(session)])
        self._env.tracker = self._metrics  # receives the rows of `wandb_log`
        self._serving = ServeLoop(self._env)
        self._lock = threading.Lock()
        self._requested: int | None = None  # number of the newest requested evaluation
        self._evaluated: tuple[int, dict[str, float] | str] | None = None
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False

    def run(self) -> None:
        """Collect groups of sequences until `stop()` is called.

        Raises:
            RlframeError: The service or the policy server did not answer, or collecting failed too often.
        """
        with handles.stop_with_program(self.stop):
            asyncio.run(self._main())

    async def _main(self) -> None:
        with self._lock:
            if self._stopped:
                return
            self._loop, self._task = asyncio.get_running_loop(), asyncio.create_task(self._serving.run())
        beside = asyncio.create_task(_advance())
        try:
            with _COLLECTING:
                await self._task
        except asyncio.CancelledError:
            if not self._stopped:
                raise
        finally:
            beside.cancel()

    def stop(self) -> None:
        """End `run()`, and disconnect from the service. Any thread can call this at any time, also repeatedly."""
        with self._lock:
            self._stopped = True
            if self._loop is not None and self._task is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._task.cancel)

    def stats(self) -> dict[str, Any]:
        """Return a dict with the rank, the incarnation, and the newest metrics of the environment."""
        return {"rank": self._rank, "incarnation": self._incarnation, "metrics": self._metrics.newest()}

    def evaluate(self, number: int) -> tuple[int, dict[str, float] | str] | None:
        """Request an evaluation. Repeated calls with the same number do not start another one.

        Args:
            number: Unique number of the evaluation.

        Returns:
            (number, metrics) after the evaluation, or (number, error text) if it failed. None until it has ended.
        """
        with self._lock:
            if self._evaluated is not None and self._evaluated[0] == number:
                return self._evaluated
            if self._requested != number and self._loop is not None and not self._loop.is_closed():
                self._requested = number
                asyncio.run_coroutine_threadsafe(self._evaluate(number), self._loop)
        return None

    async def _evaluate(self, number: int) -> None:
        before = self._metrics.count
        try:
            await self._serving.evaluate()
            await self._env.wandb_log({})
            found: dict[str, float] | str = self._metrics.since(before, "eval")
            if not found:
                _log.warning(
                    "%s.evaluate logged no metric whose name begins with 'eval', so the evaluation has no values. It "
                    'should call self.evaluate_log({"eval/NAME": value}).',
                    type(self._env).__name__,
                )
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        with self._lock:
            self._evaluated = number, found


class WarmUpNode:
    """A node that trains on the environment's demonstrations and writes the weights to the run directory.

    Args:
        session: The session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stop = threading.Event()

    def run(self) -> None:
        """Train, and write the weights in the format of released models. If `stop()` is called, write nothing."""
        session, directory = self._session, self._session.directory
        env_cls = load_env_class(session.experiment.env)
        env = env_cls(env_config(env_cls, session), [api_server_config(session)])
        config = language_config(session)
        tokenizer = load_tokenizer(config.tokenizer_name(session.experiment.agent_config))

        def demonstrations(source: random.Random, count: int) -> Sequence[tuple[str, str]]:  # each update calls this
            if self._stop.is_set():
                raise StoppedError("Stopped during the supervised warm-up.")
            return env.demonstrations(source, count)

        logger = MultiLogger([directory.open_logs(0), *session.loggers])
        try:
            with handles.stop_with_program(self.stop):
                params = warm_up(
                    session.agent,  # type: ignore[arg-type]
                    demonstrations,
                    tokenizer,
                    seed=session.experiment.seed,
                    devices=config.learner_devices,
                    shard_params=config.shard_params,
                    logger=logger,
                )
        except StoppedError:
            return
        finally:
            logger.close()
        temporary = directory.warmup.with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        weights.save(temporary, session.agent.model_config, params)  # type: ignore[attr-defined]
        temporary.rename(directory.warmup)

    def end(self, by: str, evaluate: bool = True) -> None:
        """Stop if `evaluate` is False. If True, complete the warm-up, because the evaluation needs its weights."""
        if not evaluate:
            self.stop()

    def stop(self) -> None:
        """End `run()` before the next update. Any thread can call this."""
        self._stop.set()


class RecentMetrics:
    """A tracker that keeps the newest 100 rows of an environment's logs, so that the monitor can read them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: list[dict[str, float]] = []  # the newest 100 rows
        self._newest: dict[str, float] = {}
        self.count = 0

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Store the numbers of a row. Shorten a name like `reverse_0_train/exact_match` to `train/exact_match`."""
        row = {_metric_name(name): float(value) for name, value in values.items() if isinstance(value, (int, float))}
        with self._lock:
            self.count += 1
            self._newest.update(row)
            self._rows = [*self._rows[-99:], row]

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
        """Return a text with only the number of rows, because the live page of the service shows the rows."""
        return f"{len(rows)} of {', '.join(columns)}"

    def close(self) -> None:
        """Do nothing."""

    def newest(self) -> dict[str, float]:
        """Return the newest value of each metric."""
        with self._lock:
            return dict(self._newest)

    def since(self, count: int, prefix: str) -> dict[str, float]:
        """Return the metrics after the first `count` rows. Include only names that begin with `prefix`."""
        with self._lock:
            rows = self._rows[-(self.count - count) :] if self.count > count else []
            return {name: value for row in rows for name, value in row.items() if name.startswith(prefix)}


def _metric_name(name: str) -> str:
    return re.sub("^[^/]*_(eval|train|train_perf)/", r"\1/", name)


async def _advance() -> None:
    """Report progress of the current phase every second while the event loop runs."""
    while True:
        advance()
        await asyncio.sleep(1.0)


def api_server_config(session: Session) -> APIServerConfig:
    """Return the config that the environments of a run use to connect to its policy server."""
    return APIServerConfig(
        base_url=f"{language_config(session).policy_url}/v1",
        model_name=MODEL,
        api_key="none",
        tokenizer_name=language_config(session).tokenizer_name(session.experiment.agent_config),
    )


def next_incarnation(path: pathlib.Path) -> int:
    """Add this start of an environment to the count in the file. Return the number of earlier starts."""
    number = json.loads(path.read_text()) + 1 if path.exists() else 0
    write_atomically(path, json.dumps(number), parents=True)
    return number
