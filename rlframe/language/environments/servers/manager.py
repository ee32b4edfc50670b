"""All model servers of an environment, as one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rlframe.errors import UsageError
from rlframe.language.environments.servers.config import APIServerConfig, ReasoningConfig, ServerBaseline, servers_of
from rlframe.language.environments.servers.managed import ManagedServer
from rlframe.language.environments.servers.server import APIServer
from rlframe.language.model.tokenizers import load_tokenizer


class ServerManager:
    """Sends each request to the server with the most free slots, of those that answer.

    Args:
        configs: of the servers; a ServerBaseline: those of this machine.
        slurm: take the nodes from the Slurm job, where there is one.
        testing: refused: there are no made-up answers here.
        server_class: APIServer, or one derived from it.
        max_n_completions: in one request; n above it is divided among requests.
    """

    def __init__(
        self,
        configs: ServerBaseline | Sequence[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
        server_class: type[APIServer] = APIServer,
        reasoning_config: ReasoningConfig | None = None,
        max_n_completions: int = 8,
    ) -> None:
        if testing:
            raise UsageError("testing=True (made-up answers) is not offered: point the environment at a model server.")
        self.max_n_completions = max_n_completions
        self.servers = [server_class(config, reasoning_config) for config in servers_of(configs, slurm)]

    async def chat_completion(self, **kwargs: Any) -> Any:
        """See `APIServer.chat_completion`."""
        return _merged(await self._divided("chat_completion", kwargs))

    async def completion(self, **kwargs: Any) -> Any:
        """See `APIServer.completion`."""
        return _merged(await self._divided("completion", kwargs))

    async def tokens_and_logprobs_completion(
        self, **kwargs: Any
    ) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """See `APIServer.tokens_and_logprobs_completion`."""
        answers = await self._divided("tokens_and_logprobs_completion", kwargs)
        tokens, logprobs, reasons = (list(itertools.chain(*parts)) for parts in list(zip(*answers))[1:])
        return answers[0][0], tokens, logprobs, reasons

    @contextlib.asynccontextmanager
    async def dedicated_server(self) -> AsyncIterator[APIServer]:
        """One server for all turns of a trajectory: it has the earlier ones in its cache."""
        yield self._chosen("train")

    @contextlib.asynccontextmanager
    async def managed_server(self, tokenizer: Any = None) -> AsyncIterator[ManagedServer]:
        """One server, and the tokens of all that is asked of it within the `async with`."""
        server = self._chosen("train")
        if tokenizer is None:
            named = server.config.tokenizer_name
            tokenizer = load_tokenizer(server.config.model_name if named == "none" else named)
        yield ManagedServer(server, tokenizer)

    async def update_weight(self, weight: float) -> None:
        """See `APIServer.update_weight`."""
        for server in self.servers:
            await server.update_weight(weight)

    async def close(self) -> None:
        for server in self.servers:
            await server.close()

    def _chosen(self, split: str) -> APIServer:
        def fitness(server: APIServer) -> tuple[bool, int]:
            return server.usable, (server.sem if split == "train" else server.eval_sem).free

        return max(self.servers, key=fitness)

    async def _divided(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        """The answers of as many requests as n completions take."""
        n, split = kwargs.pop("n", None) or 1, kwargs.get("split", "train")
        full, rest = divmod(n, self.max_n_completions)
        counts = [self.max_n_completions] * full + [rest] * (rest > 0)
        chosen = [self._chosen(split) for _ in counts]
        calls = [getattr(server, method)(**kwargs, n=count) for server, count in zip(chosen, counts)]
        return list(await asyncio.gather(*calls))


def _merged(answers: list[Any]) -> Any:
    first = answers[0]
    for answer in answers[1:]:
        first.choices.extend(answer.choices)
    for index, choice in enumerate(first.choices):
        choice.index = index
    return first
