"""`serve`: an environment at the trajectory service, from the trainer's first batch to its last step."""

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

_LOOK = 0.1  # seconds from one look at the service to the next, where nothing ends in between
_LEAVE = 5.0  # seconds for the last words
_PAUSE = 1.0  # seconds before what could not be taken for `service_timeout` seconds is sent again

logger = logging.getLogger(__name__)


class ServeLoop:
    """Run an environment: decide when to collect, to pause, to evaluate, to save and to end."""

    def __init__(self, env: BaseEnv) -> None:
        self._env = env
        self._config = env.config
        self._membership = Membership(env.config, env.config.wandb_name or env.name or type(env).__name__)
        env.membership = self._membership
        self._joined = asyncio.Event()
        self._collector = Collector(env.next_item, env.handle_env, env.statistics, self._config.worker_timeout)
        env.collector, env.workers = self._collector, self._collector.under_way

    async def run(self) -> None:
        """Return after the last step. Leave the service and close what it opened in any case."""
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
        looked = time.monotonic()
        while True:
            posted = self._membership.posted
            status = await self._membership.status()
            if status is None:
                await self._join()
                continue
            now = time.monotonic()
            self._env.statistics.mainloop_timings.append(now - looked)
            looked = now
            await self._look(status)
            if not self._finished(status):
                await self._collect(status, self._membership.posted - posted)
            elif self._evaluation is None:
                return
            await self._collector.wait(_LOOK)

    async def _join(self) -> None:
        """Join, or come back: a service that was started afresh does not know this environment any more."""
        env, config = self._env, self._config
        joined = await self._membership.join()
        env.env_id, env.wandb_prepend = joined.env_id, joined.wandb_name
        env.checkpoint_dir, env.checkpoint_interval = joined.checkpoint_dir, joined.checkpoint_interval
        env.curr_step = joined.starting_step
        self._total_steps = joined.num_steps if config.total_steps == -1 else config.total_steps
        if self._total_steps < 1:
            raise UsageError(f"total_steps is {config.total_steps}, and the trainer says {joined.num_steps}: set one.")
        info = await self._membership.client.info()
        env.max_token_len = info.max_token_len
        if info.batch_size != -1:
            config.batch_size = info.batch_size
        if config.group_size > config.batch_size:
            raise UsageError(
                f"A group of group_size={config.group_size} sequences fits into no batch of {config.batch_size}."
            )
        logger.info("Joined as %s (environment %d), at step %d.", joined.wandb_name, joined.env_id, env.curr_step)

    async def _track(self) -> None:
        if not self._config.use_wandb:
            return
        env, told = self._env, await self._membership.client.wandb_info()
        env.wandb_group, env.wandb_project = told.group, told.project
        env.tracker = open_wandb(self._config, told.project, told.group, env.wandb_prepend)

    async def _look(self, status: EnvStatus) -> None:
        """Do what a new step is the time for: save, evaluate, log."""
        env, config = self._env, self._config
        env.status_dict = dataclasses.asdict(status)
        if config.inference_weight != -1:
            await env.server.update_weight(status.env_weight)
        before, env.curr_step = env.curr_step, status.current_step
        if env.curr_step == before:
            return
        if _passed(before, env.curr_step, env.checkpoint_interval):
            env.save_checkpoint(env.curr_step // env.checkpoint_interval * env.checkpoint_interval)
        if _passed(before, env.curr_step, config.steps_per_eval):
            if self._evaluation is None:
                self._evaluate()
            else:
                logger.warning("The evaluation before is not done at step %d: this one is left out.", env.curr_step)
        if env.items_sent_this_step >= config.min_items_sent_before_logging:
            env.items_sent_this_step = 0
            await env.wandb_log({})

    def _evaluate(self) -> asyncio.Task[Any]:
        self._env.eval_runner = evaluation = asyncio.create_task(self._env.evaluate())
        evaluation.add_done_callback(_report)
        return evaluation

    async def evaluate(self) -> None:
        """Evaluate once it has joined and the evaluation under way is done; collecting pauses or not as configured.

        Raises:
            Exception: what the environment's `evaluate` raised.
        """
        await self._joined.wait()
        while (earlier := self._evaluation) is not None:
            await asyncio.wait([earlier])
        await self._evaluate()

    @property
    def _evaluation(self) -> asyncio.Task[Any] | None:
        """The evaluation under way."""
        runner = self._env.eval_runner
        return None if runner is None or runner.done() else runner

    def _finished(self, status: EnvStatus) -> bool:
        """Whether the trainer has, or finds in the queue, all that it needs."""
        # A queue that is to be left alone (`hold`) is told to be longer than it is.
        queued = 0 if status.hold else status.queue_size * self._config.group_size // self._config.batch_size
        return status.current_step >= self._total_steps or status.current_step + queued > self._total_steps

    async def _collect(self, status: EnvStatus, unseen: int) -> None:
        """Start groups, or pause. `unseen`: groups that were sent since the status was asked for."""
        env, config = self._env, self._config
        workers = env.max_num_workers
        handling = config.eval_handling if self._evaluation is not None else EvalHandlingEnum.NONE
        limit = int(workers * config.eval_limit_ratio) if handling is EvalHandlingEnum.LIMIT_TRAIN else workers
        wanted = self._wanted(status) - unseen
        paused = status.hold or handling is EvalHandlingEnum.STOP_TRAIN or wanted <= 0
        if paused != self._collector.gate.closed:
            logger.info("Collecting %s at step %d.", "pauses" if paused else "goes on", status.current_step)
            env.log_pause(paused)
        self._collector.gate.set(closed=paused)
        if paused:
            return
        limit = min(limit, wanted)
        env.statistics.workers_added_per_attempt.append(max(0, limit - len(self._collector.under_way)))
        await env.add_train_workers(limit)

    def _wanted(self, status: EnvStatus) -> int:
        """Groups that may be under way, so that the queue is no longer than `max_batches_offpolicy` batches."""
        config = self._config
        allowed = config.max_batches_offpolicy * self._env.derived_batch_size
        wanted = math.ceil(allowed / config.group_size) - status.queue_size
        if config.min_batch_allocation is not None:
            # Its own part of the batches is filled, however much the others have sent.
            own = config.min_batch_allocation * config.batch_size * config.max_batches_offpolicy
            wanted = max(wanted, math.ceil(own / config.group_size) - status.self_queue_size)
        return wanted


def _passed(before: int, now: int, interval: int) -> bool:
    """Whether a multiple of the interval lies behind `before`, up to `now`."""
    return interval > 0 and now // interval > before // interval


def _report(evaluation: asyncio.Task[None]) -> None:
    if not evaluation.cancelled() and (error := evaluation.exception()) is not None:
        logger.error("The evaluation failed.", exc_info=error)


class Membership:
    """One environment at the trajectory service: it joins, sends, comes back after a restart, and leaves.

    Each call is repeated for `service_timeout` seconds while the service is not there.

    Attributes:
        client: for further calls.
        posted: groups that the service has acknowledged.

    Raises (every call): as `rlframe.trajectories.AsyncTrajectoryClient`.
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
        """Wait for the trainer, and join; under its earlier name where it was there before."""
        logger.info("%s joins %s, once its trainer has asked for a batch.", self._name, self.client.url)
        config = self._config
        self._env = await self.client.register_env(
            desired_name=self._name,
            group_size=config.group_size,
            max_token_length=config.max_token_length,
            weight=config.inference_weight,
            min_batch_allocation=config.min_batch_allocation,
            # One that the service does not know (it was started afresh, or its trainer registered anew) means nothing.
            resume_token=self._env.resume_token if self._env is not None else self._saved_token(),
            wait=config.service_timeout,
        )
        if self._resume_file is not None:
            write_atomically(self._resume_file, json.dumps({"resume_token": self._env.resume_token}), parents=True)
        return self._env

    async def status(self) -> EnvStatus | None:
        """Return the service's status, or None if it does not know this environment any more."""
        assert self._env is not None
        try:
            return await self.client.env_status(self._env.env_id)
        except UsageError as error:
            logger.warning("%s joins again: %s", self._name, error)
            return None

    async def post(self, groups: Sequence[Group]) -> int:
        """Send them in one request, and return how many are kept: these outlive a crash of the service from then on.

        Those that are too old for the trainer are not. While the service answers that it cannot take them now (it is
        full, say), they wait, as all collecting does.
        """
        key, kept = new_key(), 0
        while True:
            try:
                kept = (await self.client.post(list(groups) if len(groups) > 1 else groups[0], key=key)).groups
            except StaleGroupError as error:
                logger.info("What was collected is not sent: %s", error)
            except UnavailableError as error:
                logger.warning("What was collected waits: %s", error)
                await asyncio.sleep(_PAUSE)
                continue
            self.posted += kept
            return kept

    async def leave(self) -> None:
        """Say goodbye if the service is there, and close the connections."""
        if self._env is not None:
            with contextlib.suppress(RlframeError):
                await self.client.disconnect_env(self._env.env_id, timeout=_LEAVE)
        await self.client.close()

    def _saved_token(self) -> str | None:
        if self._resume_file is None or not self._resume_file.exists():
            return None
        try:
            return json.loads(self._resume_file.read_text())["resume_token"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"resume_file {self._resume_file} is none that an environment wrote: {error}.") from error
