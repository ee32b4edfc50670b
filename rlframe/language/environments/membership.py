"""An environment at the trajectory service: it joins, asks, sends, comes back after a restart, and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import pathlib
from collections.abc import Sequence

from rlframe.errors import RlframeError, TooOldError, UnavailableError, UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.language.environments.config import BaseEnvConfig
from rlframe.trajectories.client.caller import new_key
from rlframe.trajectories.client.client import AsyncClient
from rlframe.trajectories.client.groups import Group
from rlframe.trajectories.client.replies import EnvStatus, Info, RegisteredEnv, WandbInfo

_LEAVE = 5.0  # seconds for the last words
_PAUSE = 1.0  # seconds before what could not be taken for `service_timeout` seconds is sent again

logger = logging.getLogger(__name__)


class Membership:
    """The calls of one environment. Each is repeated for `service_timeout` seconds while the service is not there.

    Attributes:
        posted: groups that the service has acknowledged.

    Raises (every call): as `rlframe.trajectories.AsyncClient`.
    """

    def __init__(self, config: BaseEnvConfig, name: str) -> None:
        self._config = config
        self._name = name
        self._client = AsyncClient(
            config.rollout_server_url, token=config.service_token, timeout=config.service_timeout
        )
        self._resume_file = None if config.resume_file is None else pathlib.Path(config.resume_file)
        self._env: RegisteredEnv | None = None
        self.posted = 0

    async def join(self) -> RegisteredEnv:
        """Waits for the trainer, and joins; under its earlier name where it was there before."""
        logger.info("%s joins %s, once its trainer has asked for a batch.", self._name, self._client.url)
        config = self._config
        self._env = await self._client.register_env(
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

    async def info(self) -> Info:
        return await self._client.info()

    async def wandb_info(self) -> WandbInfo:
        return await self._client.wandb_info()

    async def status(self) -> EnvStatus | None:
        """None where the service does not know this environment any more."""
        assert self._env is not None
        try:
            return await self._client.env_status(self._env.env_id)
        except UsageError as error:
            logger.warning("%s joins again: %s", self._name, error)
            return None

    async def post(self, groups: Sequence[Group]) -> int:
        """Sends them in one request, and returns how many are kept: these outlive a crash of the service from then on.

        Those that are too old for the trainer are not. While the service answers that it cannot take them now (it is
        full, say), they wait, as all collecting does.
        """
        key, kept = new_key(), 0
        while True:
            try:
                kept = (await self._client.post(list(groups) if len(groups) > 1 else groups[0], key=key)).groups
            except TooOldError as error:
                logger.info("What was collected is not sent: %s", error)
            except UnavailableError as error:
                logger.warning("What was collected waits: %s", error)
                await asyncio.sleep(_PAUSE)
                continue
            self.posted += kept
            return kept

    async def leave(self) -> None:
        """Says goodbye if the service is there, and closes the connections."""
        if self._env is not None:
            with contextlib.suppress(RlframeError):
                await self._client.disconnect_env(self._env.env_id, timeout=_LEAVE)
        await self._client.close()

    def _saved_token(self) -> str | None:
        if self._resume_file is None or not self._resume_file.exists():
            return None
        try:
            return json.loads(self._resume_file.read_text())["resume_token"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"resume_file {self._resume_file} is none that an environment wrote: {error}.") from error
