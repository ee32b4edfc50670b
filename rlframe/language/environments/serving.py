"""The `serve` command: an environment sends groups to the trajectory service until the trainer's last step."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import pathlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlframe.errors import RlframeError, StaleGroupError, UnavailableError, UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.language.environments.collecting import Collector
from rlframe.language.environments.config import BaseEnvConfig, EvalHandlingEnum
from rlframe.language.environments.metrics import open_wandb
from rlframe.trajectories.client.base_client import new_key
from rlframe.trajectories.client.client import AsyncTrajectoryClient
from rlframe.trajectories.client.groups import Group
from rlframe.trajectories.messages import EnvStatus, RegisteredEnv

if TYPE_CHECKING:
    from rlframe.language.environments.env import BaseEnv

_POLL_INTERVAL = 0.1  # seconds between two status requests to the service; less if an attempt ends earlier
_LEAVE_TIMEOUT = 5.0  # seconds; timeout of the request that disconnects from the service
_PAUSE = 1.0  # seconds of pause after the service has refused groups for `service_timeout` seconds

logger = logging.getLogger(__name__)


class ServeLoop:
    """The main loop of an environment. It decides when to collect, pause, evaluate, save and end."""

    def __init__(self, env: BaseEnv) -> None:
        self._env = env
        self._config = env.config
        self._membership = Membership(env.config, env.config.wandb_name or env.name or type(env).__name__)
        env.membership = self._membership
        self._joined = asyncio.Event()
        self._collector = Collector(env.next_item, env.handle_env, env.statistics, self._config.worker_timeout)
        env.collector, env.workers = self._collector, self._collector.under_way

    async def run(self) -> None:
        """Run until the trainer's last step. At the end, or after an error, disconnect and close the environment."""
        env = self._env
        try:
            await env.setup()
            await self._join()
            if env.curr_step > 0:
                env.load_checkpoint()
            await self._track()
            self._joined.set()
            await self._serve()
            await env.wandb_log({})
        finally:
            await self._collector.stop()
            if (evaluation := self._evaluation) is not None:
                evaluation.cancel()
                await asyncio.gather(evaluation, return_exceptions=True)
            await self._membership.leave()
            await env.close()

    async def _serve(self) -> None:
        last_poll = time.monotonic()
        while True:
            posted = self._membership.posted
            status = await self._membership.status()
            if status is None:
                await self._join()
                continue
            now = time.monotonic()
            self._env.statistics.mainloop_timings.append(now - last_poll)
            last_poll = now
            await self._handle_status(status)
            if not self._finished(status):
                await self._collect(status, self._membership.posted - posted)
            elif self._evaluation is None:
                return
            await self._collector.wait(_POLL_INTERVAL)

    async def _join(self) -> None:
        """Register with the service. Called again if the service has restarted and no longer has this environment."""
        env, config = self._env, self._config
        joined = await self._membership.join()
        env.env_id, env.wandb_prepend = joined.env_id, joined.wandb_name
        env.checkpoint_dir, env.checkpoint_interval = joined.checkpoint_dir, joined.checkpoint_interval
        env.curr_step = joined.starting_step
        self._total_steps = joined.num_steps if config.total_steps == -1 else config.total_steps
        if self._total_steps < 1:
            raise UsageError(
                f"Set total_steps: the environment has {config.total_steps}, and the trainer has {joined.num_steps}."
            )
        info = await self._membership.client.info()
        env.max_token_len = info.max_token_len
        if info.batch_size != -1:
            config.batch_size = info.batch_size
        if config.group_size > config.batch_size:
            raise UsageError(
                f"A group of group_size={config.group_size} sequences does not fit into a batch of {config.batch_size}."
            )
        logger.info("Registered as %s (environment %d), at step %d.", joined.wandb_name, joined.env_id, env.curr_step)

    async def _track(self) -> None:
        if not self._config.use_wandb:
            return
        env, wandb = self._env, await self._membership.client.wandb_info()
        env.wandb_group, env.wandb_project = wandb.group, wandb.project
        env.tracker = open_wandb(self._config, wandb.project, wandb.group, env.wandb_prepend)

    async def _handle_status(self, status: EnvStatus) -> None:
        """Update the environment's step. After a new step, save, evaluate and log if they are due."""
        env, config = self._env, self._config
        env.status_dict = dataclasses.asdict(status)
        if config.inference_weight != -1:
            await env.server.update_weight(status.env_weight)
        before, env.curr_step = env.curr_step, status.current_step
        if env.curr_step == before:
            return
        if _crosses_interval(before, env.curr_step, env.checkpoint_interval):
            env.save_checkpoint(env.curr_step // env.checkpoint_interval * env.checkpoint_interval)
        if _crosses_interval(before, env.curr_step, config.steps_per_eval):
            if self._evaluation is None:
                self._evaluate()
            else:
                logger.warning(
                    "The previous evaluation is still running, so the evaluation at step %d is skipped.", env.curr_step
                )
        if env.items_sent_this_step >= config.min_items_sent_before_logging:
            env.items_sent_this_step = 0
            await env.wandb_log({})

    def _evaluate(self) -> asyncio.Task[Any]:
        self._env.eval_runner = evaluation = asyncio.create_task(self._env.evaluate())
        evaluation.add_done_callback(_report)
        return evaluation

    async def evaluate(self) -> None:
        """Wait until the environment is registered and no evaluation runs. Then evaluate.

        During the evaluation, collecting may pause; see `EvalHandlingEnum`.

        Raises:
            Exception: Any exception of the environment's `evaluate`.
        """
        await self._joined.wait()
        while (earlier := self._evaluation) is not None:
            await asyncio.wait([earlier])
        await self._evaluate()

    @property
    def _evaluation(self) -> asyncio.Task[Any] | None:
        """The evaluation that runs now, or None."""
        runner = self._env.eval_runner
        return None if runner is None or runner.done() else runner

    def _finished(self, status: EnvStatus) -> bool:
        """Return True if the trainer and the queue have all groups that the trainer still needs."""
        # If `hold` is set, the service reports a queue that is too long, to make environments pause.
        queued = 0 if status.hold else status.queue_size * self._config.group_size // self._config.batch_size
        return status.current_step >= self._total_steps or status.current_step + queued > self._total_steps

    async def _collect(self, status: EnvStatus, unseen: int) -> None:
        """Start attempts, or pause. `unseen` is the number of groups that were sent after the service made `status`."""
        env, config = self._env, self._config
        workers = env.max_num_workers
        handling = config.eval_handling if self._evaluation is not None else EvalHandlingEnum.NONE
        limit = int(workers * config.eval_limit_ratio) if handling is EvalHandlingEnum.LIMIT_TRAIN else workers
        wanted = self._wanted(status) - unseen
        paused = status.hold or handling is EvalHandlingEnum.STOP_TRAIN or wanted <= 0
        if paused != self._collector.gate.closed:
            logger.info("Collecting %s at step %d.", "pauses" if paused else "continues", status.current_step)
            env.log_pause(paused)
        self._collector.gate.set(closed=paused)
        if paused:
            return
        limit = min(limit, wanted)
        env.statistics.workers_added_per_attempt.append(max(0, limit - len(self._collector.under_way)))
        await env.add_train_workers(limit)

    def _wanted(self, status: EnvStatus) -> int:
        """Return the number of groups to collect until the queue has `max_batches_offpolicy` batches."""
        config = self._config
        allowed = config.max_batches_offpolicy * self._env.derived_batch_size
        wanted = math.ceil(allowed / config.group_size) - status.queue_size
        if config.min_batch_allocation is not None:
            # Collect the minimum that is reserved for this environment, even if other environments filled the queue.
            own = config.min_batch_allocation * config.batch_size * config.max_batches_offpolicy
            wanted = max(wanted, math.ceil(own / config.group_size) - status.self_queue_size)
        return wanted


def _crosses_interval(before: int, now: int, interval: int) -> bool:
    """Return True if a multiple of the interval lies after `before`, and not after `now`."""
    return interval > 0 and now // interval > before // interval


def _report(evaluation: asyncio.Task[None]) -> None:
    if not evaluation.cancelled() and (error := evaluation.exception()) is not None:
        logger.error("The evaluation failed.", exc_info=error)


class Membership:
    """The connection of one environment to the trajectory service. It registers, sends groups and disconnects.

    Each call is retried for `service_timeout` seconds while the service is unreachable.

    Attributes:
        client: Client of the service.
        posted: Number of groups that the service has accepted.

    Raises (every call): See `rlframe.trajectories.AsyncTrajectoryClient`.
    """

    def __init__(self, config: BaseEnvConfig, name: str) -> None:
        self._config = config
        self._name = name
        self.client = AsyncTrajectoryClient(
            config.rollout_server_url, token=config.service_token, timeout=config.service_timeout
        )
        self._resume_file = None if config.resume_file is None else pathlib.Path(config.resume_file)
        self._env: RegisteredEnv | None = None
        self.posted = 0

    async def join(self) -> RegisteredEnv:
        """Wait for the trainer, and register. An environment that registers again keeps its name."""
        logger.info("%s registers with %s when the trainer has requested a batch.", self._name, self.client.url)
        config = self._config
        self._env = await self.client.register_env(
            desired_name=self._name,
            group_size=config.group_size,
            max_token_length=config.max_token_length,
            weight=config.inference_weight,
            min_batch_allocation=config.min_batch_allocation,
            # The service ignores this token if it is unknown, because the service was reset or the trainer is new.
            resume_token=self._env.resume_token if self._env is not None else self._saved_token(),
            wait=config.service_timeout,
        )
        if self._resume_file is not None:
            write_atomically(self._resume_file, json.dumps({"resume_token": self._env.resume_token}), parents=True)
        return self._env

    async def status(self) -> EnvStatus | None:
        """Return the service's status for this environment; None if the environment is no longer registered."""
        assert self._env is not None
        try:
            return await self.client.env_status(self._env.env_id)
        except UsageError as error:
            logger.warning("%s registers again: %s", self._name, error)
            return None

    async def post(self, groups: Sequence[Group]) -> int:
        """Send groups in one request. Return the number of accepted groups. A crash of the service does not lose these.

        Groups that are too old for the trainer are dropped. While the service refuses groups, for example because it is
        full, this call waits, and all attempts pause.
        """
        key, kept = new_key(), 0
        while True:
            try:
                kept = (await self.client.post(list(groups) if len(groups) > 1 else groups[0], key=key)).groups
            except StaleGroupError as error:
                logger.info("Collected groups are dropped: %s", error)
            except UnavailableError as error:
                logger.warning("Collected groups wait for the service: %s", error)
                await asyncio.sleep(_PAUSE)
                continue
            self.posted += kept
            return kept

    async def leave(self) -> None:
        """Disconnect from the service if it is reachable, and close the connections."""
        if self._env is not None:
            with contextlib.suppress(RlframeError):
                await self.client.disconnect_env(self._env.env_id, timeout=_LEAVE_TIMEOUT)
        await self.client.close()

    def _saved_token(self) -> str | None:
        if self._resume_file is None or not self._resume_file.exists():
            return None
        try:
            return json.loads(self._resume_file.read_text())["resume_token"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"The resume_file {self._resume_file} was not written by an environment: {error}."
            ) from error
