"""`BaseEnv`: the base class of environments for language models."""

from __future__ import annotations

import abc
import asyncio
import logging
import random
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar, Union

from rlframe.errors import EnvError
from rlframe.language.environments import cli, collecting, files, groups
from rlframe.language.environments.collecting import CollectAttempt, Collector, current_attempt, gather_or_cancel
from rlframe.language.environments.config import APIServerConfig, BaseEnvConfig, ReasoningConfig, ServerBaseline
from rlframe.language.environments.groups import Item, ScoredDataGroup, ScoredDataItem
from rlframe.language.environments.metrics import CollectStatistics, GroupStatistics, Tracker, length_metrics
from rlframe.language.environments.model_server import APIServer
from rlframe.language.environments.server_manager import ServerManager
from rlframe.language.environments.serving import Membership, ServeLoop
from rlframe.language.model.tokenizers import load_tokenizer

T = TypeVar("T")
ServerConfigs = Union[ServerBaseline, list[APIServerConfig]]

_QUEUES = ("queue_size", "self_queue_size")  # these fields of the service's status are logged

logger = logging.getLogger(__name__)


class BaseEnv(abc.ABC):
    """An environment that requests completions from a model, scores them, and sends groups to the trajectory service.

    A subclass implements `setup`, `get_next_item`, `evaluate`, and either `collect_trajectory` or
    `collect_trajectories`. `MyEnv.cli()` runs the command line. Names and behavior are the same as in `atroposlib`.

    Args:
        config: Options, an instance of the class's `env_config_cls`.
        server_configs: One config or a list, for the model servers.
        slurm: Use the model servers of the Slurm job, if there is one.
        testing: Not supported.

    Attributes:
        server: The model servers, a `ServerManager`.
        tokenizer: The tokenizer that the config names.
        curr_step: The trainer's step: the number of batches it has received.
        max_token_len: Maximum number of tokens of a sequence, set by the trainer. -1 before registration.
        workers, eval_workers: Running attempts to collect groups, and running tasks of an evaluation.
        status_dict: Last response of the service to `/status-env`.
        backlog: Items to use before `get_next_item` is called again.
        process_mode: True if groups are written to a file, without trainer and service.
    """

    name: str | None = None
    env_config_cls: type[BaseEnvConfig] = BaseEnvConfig
    server_cls: type[APIServer] = APIServer

    def __init__(
        self, config: BaseEnvConfig, server_configs: ServerConfigs, slurm: bool = False, testing: bool = False
    ) -> None:
        self.config: Any = config
        reasoning = ReasoningConfig(config.thinking_mode, config.reasoning_effort, config.max_reasoning_tokens)
        self.server = ServerManager(server_configs, slurm, testing, self.server_cls, reasoning)
        self.tokenizer = load_tokenizer(config.tokenizer_name)
        self.curr_step = 0
        self.max_token_len = -1
        self.env_id: int | None = None
        self.status_dict: dict[str, Any] = {}
        self.backlog: list[Item] = []
        self.workers: set[CollectAttempt] = set()
        self.collector: Collector | None = None  # set when collecting starts
        self.eval_workers: set[asyncio.Task[Any]] = set()
        self.eval_runner: asyncio.Task[Any] | None = None
        self.checkpoint_dir, self.checkpoint_interval = "", -1
        self.wandb_prepend: str | None = None  # name of this environment at the service
        self.wandb_group: str | None = None
        self.wandb_project: str | None = None
        self.items_sent_this_step = 0
        self.process_mode = False
        self.rollouts_for_wandb: list[Any] = []
        self.completion_lengths: list[int] = []
        self.collected = GroupStatistics()
        self._logged_reasons: set[str] = set()  # logged reasons why groups were not sent
        self.statistics = CollectStatistics()
        self.tracker: Tracker | None = None
        self.membership: Membership | None = None
        path = config.data_path_to_save_groups
        self.groups_file = None if path is None else files.GroupsFile(path)

    @classmethod
    def get_cli_serve_config_cls(cls) -> type[cli.CommandConfig]:
        """Return the class of the options of `serve`: a pydantic model with the defaults of `config_init`."""
        return cli.config_cls(cls, "serve")

    @classmethod
    def get_cli_process_config_cls(cls) -> type[cli.CommandConfig]:
        """Return the class of the options of `process`."""
        return cli.config_cls(cls, "process")

    @classmethod
    def get_cli_evaluate_config_cls(cls) -> type[cli.CommandConfig]:
        """Return the class of the options of `evaluate`."""
        return cli.config_cls(cls, "evaluate")

    # Methods that subclasses override.

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, ServerConfigs]:
        """Return the default options: (config of the environment, configs of the model servers)."""
        return cls.env_config_cls(), ServerBaseline()

    async def setup(self) -> None:
        """Load the environment's data. Called once."""
        raise NotImplementedError(f"{type(self).__name__} must implement its setup: async def setup(self).")

    @abc.abstractmethod
    async def get_next_item(self) -> Item:
        """Return the item for the next group, or None if there is no item now."""

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | Any | None, list[Item]]:
        """Return (sequence, backlog): one sequence that answers the item, or None; and a list of further items."""
        raise NotImplementedError(f"{type(self).__name__} must implement collect_trajectory or collect_trajectories.")

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        """Return (groups, backlog): one group that answers the item, a list of groups, or None; and further items.

        The default calls `collect_trajectory` `group_size` times concurrently and drops None results. If all results
        are `ScoredDataItem`, they become one group. Otherwise `postprocess_histories` gets the list of results.
        """
        results = await gather_or_cancel(self.collect_trajectory(item) for _ in range(self.config.group_size))
        sequences: list[Any] = [sequence for sequence, _ in results if sequence is not None]
        backlog = [further for _, more in results for further in more]
        if not sequences or not all(isinstance(one, Mapping) and "tokens" in one for one in sequences):
            return sequences, backlog
        group = groups.group_from_items(sequences)
        if len(sequences) < self.config.group_size:  # without it, a group with fewer sequences is not sent
            group["group_overrides"] = {**(group.get("group_overrides") or {}), "group_size": len(sequences)}
        return group, backlog

    async def postprocess_histories(self, trajectories: Any) -> Any:
        """Convert the results of `collect_trajectories` to groups, or change its groups, before the groups are sent."""
        return trajectories

    @abc.abstractmethod
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the model. Called every `steps_per_eval` steps. `gather_eval` can run many tasks concurrently."""

    def demonstrations(self, source: random.Random, count: int) -> list[tuple[str, str]]:
        """Return `count` pairs (prompt, correct answer) for a supervised warm-up. Draw them at random with `source`.

        The prompts must not occur in evaluations. This method may be called before `setup`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no demonstrations, which a supervised warm-up needs. Implement "
            "def demonstrations(self, source, count)."
        )

    async def cleanup(self) -> None:  # noqa: B027 - overriding is optional
        """Clean up after an item. Called after each item, even if its attempt failed."""

    # Methods that subclasses call.

    async def gather_eval(self, tasks: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Run all tasks and return their results. At most `max_eval_workers` run at once; `eval_workers` has these."""
        slots = asyncio.Semaphore(self.config.max_eval_workers)

        async def run(task: Coroutine[Any, Any, T]) -> T:
            async with slots:
                worker = asyncio.current_task()
                assert worker is not None
                self.eval_workers.add(worker)
                try:
                    return await task
                finally:
                    self.eval_workers.discard(worker)

        listed = list(tasks)
        try:
            return await gather_or_cancel(map(run, listed))
        finally:
            for task in listed:
                task.close()  # after an error, some tasks have not started; without `close`, Python would warn

    @property
    def max_num_workers(self) -> int:
        """Number of groups that are collected concurrently."""
        config = self.config
        if config.max_num_workers == -1:
            return config.max_num_workers_per_node * len(self.server.servers)
        return config.max_num_workers

    @property
    def derived_batch_size(self) -> int:
        """Number of sequences in a batch without those that other environments reserve; -1 if it is unknown."""
        size = self.config.batch_size
        if size == -1 or not self.status_dict:
            return size
        fraction = self.status_dict["unallocated_fraction"] + (self.config.min_batch_allocation or 0.0)
        return int(size * fraction)

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Save `data` as the environment's checkpoint of a step. Called at the trainer's checkpoint interval.

        To save more state, override this method: add the state to `data`, and call the method of the base class.
        """
        if data is not None:
            path = files.save_checkpoint(self.checkpoint_dir, self.wandb_prepend or "", step, data)
            logger.info("Saved %s.", path)

    def load_checkpoint(self) -> None:
        """Load the newest checkpoint that is not after `curr_step`. Set the attributes that it contains."""
        for name, value in files.load_checkpoint(self.checkpoint_dir, self.wandb_prepend or "", self.curr_step).items():
            setattr(self, name, value)

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Item = None) -> None:
        """Add a group to the table of rollouts, as rows (text, score)."""
        if self.tracker is None:
            return
        for group in scored_data if isinstance(scored_data, list) else [scored_data]:
            count = self.config.num_rollouts_per_group_for_logging
            rows = zip(group["tokens"], group["scores"])
            kept = [(self.tokenizer.decode(list(tokens)), score) for tokens, score in rows]
            self.rollouts_for_wandb.append(kept if count == -1 else kept[:count])
        del self.rollouts_for_wandb[: -self.config.num_rollouts_to_keep]

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Add the table of rollouts to the metrics."""
        if self.rollouts_for_wandb and self.tracker is not None:
            rows = [row for group in self.rollouts_for_wandb for row in group]
            wandb_metrics["train/rollouts"] = self.tracker.table(["text", "score"], rows)
        return wandb_metrics

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log metrics. To log more metrics, override this method, and call the method of the base class."""
        metrics = dict(wandb_metrics or {})
        longest = self.max_token_len if self.max_token_len > 0 else self.config.max_token_length
        metrics |= length_metrics(self.completion_lengths, longest)
        metrics |= self.collected.report()
        metrics |= {f"train/{name}": self.status_dict[name] for name in _QUEUES if name in self.status_dict}
        metrics["train/active_workers"] = len(self.workers)
        metrics = await self.create_rollout_table(metrics)
        metrics = self.perf_stats(metrics)
        self.rollouts_for_wandb, self.completion_lengths = [], []
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        if shown := " ".join(f"{name}={value:.4g}" for name, value in numbers.items() if "_perf/" not in name):
            logger.info("Step %d: %s", self.curr_step, shown)
        if self.tracker is not None:
            metrics = self._with_prefix(metrics)
            for index, server in enumerate(self.server.servers):
                metrics = await server.wandb_metrics(metrics, f"server_{index}")
            self.tracker.write(self.curr_step, metrics)

    def _with_prefix(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Add this environment's name to the metrics' names, because environments can share a run in W&B."""
        prefix = "" if self.wandb_prepend is None else f"{self.wandb_prepend}_"
        return {f"{prefix}{name}": value for name, value in metrics.items()}

    def log_pause(self, paused: bool) -> None:
        """Write to the log that collecting pauses or continues."""
        if self.tracker is not None:
            self.tracker.write(self.curr_step, self._with_prefix({"train/paused": int(paused)}))

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        """Add metrics about collecting since the last call: durations, and numbers of successes and failures."""
        return self.statistics.report(metrics_dict)

    async def evaluate_log(
        self,
        metrics: dict[str, Any],
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: dict[str, Any] | None = None,
        samples: list[dict[str, Any]] | None = None,
        verbose: bool = True,
    ) -> None:
        """Log the results of an evaluation, and write them to `data_dir_to_save_evals`.

        A metric whose name does not begin with `eval` is logged as `eval/NAME`. The files are `metrics.json` and
        `samples.jsonl`.
        """
        task = task_name or f"{self.name or type(self).__name__}_eval"
        end = time.time() if end_time is None else end_time
        if verbose:
            logger.info("%s: %s", task, " ".join(f"{name}={value}" for name, value in metrics.items()))
        if self.tracker is not None:
            numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
            named = {name if name.startswith("eval") else f"eval/{name}": value for name, value in numbers.items()}
            self.tracker.write(self.curr_step, self._with_prefix(named))
        if self.config.data_dir_to_save_evals is None:
            return
        general = {
            "model_name": model_name or self.server.servers[0].config.model_name,
            "total_evaluation_time_seconds": str(0.0 if start_time is None else end - start_time),
            "generation_parameters": {"max_new_tokens": self.config.max_token_length, **(generation_parameters or {})},
        }
        results = {"config_general": general, "results": {f"rlframe|{task}|0": metrics, "all": metrics}}
        path = files.write_evaluation(self.config.data_dir_to_save_evals, results, samples)
        logger.info("The results of the evaluation are in %s.", path)

    # Methods that run the environment.

    async def add_train_workers(self, limit: int | None = None) -> None:
        """Start attempts to collect groups until `limit` attempts run. None means `max_num_workers`."""
        assert self.collector is not None, "env_manager and process_manager create the collector"
        await self.collector.fill(self.max_num_workers if limit is None else limit)

    async def env_manager(self) -> None:
        """Run `serve`: collect for the trainer until its last step, then leave the service.

        Raises:
            RlframeError: The service, the trainer or a model did not answer before its deadline, or collecting failed
                too often.
        """
        await ServeLoop(self).run()

    async def process_manager(self) -> None:
        """Run `process`: collect `total_steps` groups into a JSONL and an HTML file."""
        lines, page = await collecting.process(self)
        logger.info("The groups are in %s; a page to read them is %s.", lines, page)

    @classmethod
    def cli(cls) -> None:
        """Run the command line (`serve`, `process` or `evaluate`) and exit the process with the exit code."""
        cli.main(cls)

    async def next_item(self) -> Item:
        """Return an item from the backlog. If the backlog is empty, return a new item."""
        return self.backlog.pop() if self.backlog else await self.get_next_item()

    async def handle_env(self, item: Item) -> bool:
        """Collect groups for an item, and send them; in process mode, write them. Return True if there was a group."""
        try:
            collected, further = await self.collect_trajectories(item)
            self.backlog.extend(further)
            scored = await self.postprocess_histories(collected) if collected else None
            return bool(scored) and await self.handle_send_to_api(scored, item, do_send_to_api=not self.process_mode)
        finally:
            await self.cleanup()

    async def handle_send_to_api(
        self,
        scored_data: ScoredDataGroup | Sequence[ScoredDataGroup | None] | None,
        item: Item = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> bool:
        """Check groups, write them to the configured files, and send them if `do_send_to_api` is True.

        Returns:
            True if the service accepted a group. If groups are not sent, True if a group is valid.

        Raises:
            UsageError: The rows of a group do not have the same length.
        """
        listed: list[Any] = list(scored_data) if isinstance(scored_data, (list, tuple)) else [scored_data]
        doing = current_attempt.get()
        fit = []
        for group in filter(None, listed):
            if not issubclass(type(group), Mapping):
                raise EnvError(
                    f"{type(self).__name__} can only send groups (ScoredDataGroup), got {type(group).__name__}. Return "
                    "a ScoredDataItem from collect_trajectory, or convert the results in postprocess_histories."
                )
            if why := groups.rejection_reason(self, group, abort_on_any_max_length_exceeded):
                if why not in self._logged_reasons:  # log each reason only once
                    self._logged_reasons.add(why)
                    logger.info("A group is not sent: %s. (train/items_rejected counts these groups.)", why)
                continue
            message = groups.to_trajectory_group(group, self.env_id, None if doing is None else doing.policy_version)
            if self.config.include_messages and message.messages is None:
                group = groups.with_messages(self.tokenizer, group)
                message = groups.to_trajectory_group(group, self.env_id, message.policy_version)
            self.completion_lengths += groups.completion_lengths(group)
            newest = None if doing is None else doing.newest_version
            self.collected.add(group["scores"], message.policy_version, newest)
            await self.add_rollouts_for_wandb(group, item)
            if self.groups_file is not None:
                self.groups_file.write(group)
            fit.append(message)
        if fit and do_send_to_api:
            assert self.membership is not None, "env_manager registers before it collects"
            kept = await self.membership.post(fit)
            self.items_sent_this_step += kept
            return kept > 0
        return bool(fit)

    async def close(self) -> None:
        """Close files, connections and the run in Weights & Biases."""
        if self.groups_file is not None:
            self.groups_file.close()
        await self.server.close()
        if self.tracker is not None:
            self.tracker.close()
            self.tracker = None
