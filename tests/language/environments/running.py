"""Tools for tests: an environment that runs in a thread, and a trainer that receives its groups."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rlframe.language.environments import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from rlframe.trajectories import Group, TrajectoryClient
from tests.language.environments.model import Model

DEADLINE = 60.0


class Letters(BaseEnv):
    """An environment that requests one letter per sequence. The score of a sequence is its index in the group."""

    name = "letters"

    async def setup(self):
        self.number = 0

    async def get_next_item(self):
        self.number += 1
        return f"item {self.number}"

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(prompt=item, n=self.config.group_size, max_tokens=1)
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[float(index) for index in range(len(nodes))],
        )
        return group, []

    async def evaluate(self, *args, **kwargs):
        pass


def settings(url: str, **options: Any) -> dict[str, Any]:
    defaults = {"group_size": 2, "max_num_workers": 2, "use_wandb": False, "max_token_length": 64, "total_steps": -1}
    return {"rollout_server_url": url, "service_timeout": DEADLINE, **defaults, **options}


def make_env(env_cls: type[BaseEnv], model: Model, config: BaseEnvConfig | None = None, **options: Any) -> BaseEnv:
    """Make an environment that uses a model. `options` change the default `settings`; a config replaces them."""
    if config is None:
        config = env_cls.env_config_cls(**settings(options.pop("url", "http://127.0.0.1:1"), **options))
    return env_cls(config, [APIServerConfig(base_url=model.url, model_name="m", timeout=int(DEADLINE))])


class Running:
    """A thread that runs an environment's `env_manager`."""

    def __init__(self, make: Callable[[], BaseEnv]) -> None:
        self.error: BaseException | None = None
        self.env: Any = None
        self._made = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(make,), daemon=True)
        self._thread.start()
        assert self._made.wait(DEADLINE)

    def _run(self, make: Callable[[], BaseEnv]) -> None:
        async def serve() -> None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            try:
                self.env = make()
            finally:
                self._made.set()
            await self.env.env_manager()

        try:
            asyncio.run(serve())
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        """Wait until the environment has ended. Raise its error, if there is one."""
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive(), "the environment does not end"
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            self.join()


@contextlib.contextmanager
def serving_env(make: Callable[[], BaseEnv]) -> Iterator[Running]:
    """Run an environment's `env_manager` in a thread. Stop it at the end of the `with` block."""
    running = Running(make)
    try:
        yield running
    finally:
        if running._thread.is_alive():
            running.stop()


@contextlib.contextmanager
def trainer(url: str, requests_batch: bool = True, **options: Any) -> Iterator[TrajectoryClient]:
    """Register a trainer, and yield its client. If `requests_batch` is True, request a batch before."""
    with TrajectoryClient(url, timeout=DEADLINE) as client:
        client.register(**{"batch_size": 2, "max_token_len": 64, "num_steps": 1000, **options})
        if requests_batch:
            assert client.batch() is None
        yield client


def pull(client: TrajectoryClient) -> list[Group]:
    """Wait for the next batch, and return its groups."""
    batch = client.batch(wait=DEADLINE)
    assert batch is not None, "no batch came"
    return batch.groups


def text_of(tokens: Any) -> str:
    """Decode tokens to text. Ignore special tokens."""
    return bytes(int(token) for token in tokens if token < 256).decode()


def prompt_of(group: Group) -> str:
    """Return the text of the tokens in the group's first sequence that the model did not sample."""
    return text_of(group.tokens[0][group.masks[0] == -100])
