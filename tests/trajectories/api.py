"""Helpers for tests of the service over HTTP: one run of the service, and short calls."""

from __future__ import annotations

import itertools
from typing import Any

import httpx

SETTINGS = {
    "wandb_group": "group",
    "wandb_project": "project",
    "batch_size": 4,
    "max_token_len": 512,
    "checkpoint_dir": "checkpoints",
    "save_checkpoint_interval": 10,
    "starting_step": 3,
    "num_steps": 1000,
}
ENV = {"max_token_length": 100, "desired_name": "env", "weight": 1.0, "group_size": 2}
ITEM_KEYS = {
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "overrides"),
    *("inference_logprobs", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs"),
}
_numbers = itertools.count()


def group(sequences: int = 2, mark: int = 0, **fields: Any) -> dict[str, Any]:
    """Return a group with sequences of one, two, three, ... tokens. Every token is `mark`."""
    tokens = [[mark] * (i + 1) for i in range(sequences)]
    return {"tokens": tokens, "masks": tokens, "scores": [0.5] * sequences, **fields}


class Api:
    """One run of the service. Without a name, it is the run `default`."""

    def __init__(self, client: httpx.Client, run: str | None = None) -> None:
        self.client = client
        self.prefix = "" if run is None else f"/runs/{run}"

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.request("GET", self.prefix + path, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(self.prefix + path, json=json, **options)

    def register(self, **settings: Any) -> int:
        return self.post("/register", {**SETTINGS, **settings}).json()["uuid"]

    def started(self, **settings: Any) -> Api:
        """Register a trainer, and request the first batch."""
        self.register(**settings)
        assert self.get("/batch").json()["batch"] is None
        return self

    def join(self, **fields: Any) -> dict[str, Any]:
        return self.post("/register-env", {**ENV, **fields}).json()

    def send(self, *marks: int, **fields: Any) -> None:
        for mark in marks:
            assert self.post("/scored_data", group(mark=mark, **fields)).json()["status"] in ("received", "buffered")

    def marks(self, **params: Any) -> list[int] | None:
        """Return the marks of the groups in the next batch, or None if there is no batch."""
        batch = self.get("/batch", params=params).json()["batch"]
        return batch and marks_of(batch)


def marks_of(items: list[dict[str, Any]]) -> list[int]:
    return [item["tokens"][0][0] for item in items]


def fresh_name() -> str:
    return f"run-{next(_numbers)}"
