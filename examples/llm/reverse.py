"""Reverse a string of lowercase letters: the correct answer to `abc>` is `cba`. Needs no download.

python examples/llm/reverse.py evaluate --openai.base_url http://localhost:8001/v1
"""

from __future__ import annotations

import random
import string
import zlib
from typing import Any

from pydantic import Field

from rlframe.language import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class ReverseConfig(BaseEnvConfig):
    min_length: int = Field(default=1, ge=1, description="Smallest length of a string, in letters.")
    max_length: int = Field(default=6, ge=1, description="Largest length of a string, in letters.")
    eval_size: int = Field(default=200, ge=1, description="Number of different held-out strings per evaluation.")
    seed: int = Field(default=0, description="Seed of the training strings.")


def held_out(word: str) -> bool:
    """Return True if a string is only for evaluations. About one in ten is, independent of the seed."""
    return zlib.crc32(word.encode()) % 10 == 0


class Reverse(BaseEnv):
    name = "reverse"
    env_config_cls = ReverseConfig

    @classmethod
    def config_init(cls) -> tuple[ReverseConfig, list[APIServerConfig]]:
        config = ReverseConfig(
            group_size=16, max_token_length=16, tokenizer_name="byte", use_wandb=False, total_steps=-1
        )
        return config, [APIServerConfig(base_url="http://localhost:8001/v1", model_name="policy")]

    @staticmethod
    def prompt(word: str) -> str:
        return f"{word}>"

    @staticmethod
    def answer(word: str) -> str:
        return word[::-1]

    async def setup(self) -> None:
        self.random = random.Random(self.config.seed)
        examiner = random.Random(1)  # not seed 0, with which the preset grpo/reverse was tuned
        words = dict.fromkeys(self.word(examiner, True) for _ in range(10 * self.config.eval_size))
        self.exam = list(words)[: self.config.eval_size]  # different strings; may be fewer than eval_size
        self.metrics: dict[str, float] = {}

    def word(self, source: random.Random, for_exam: bool) -> str:
        """Return a random string. All lengths have the same probability."""
        while True:
            length = source.randint(self.config.min_length, self.config.max_length)
            word = "".join(source.choices(string.ascii_lowercase, k=length))
            if held_out(word) == for_exam:
                return word

    def demonstrations(self, source: random.Random, count: int) -> list[tuple[str, str]]:
        words = [self.word(source, False) for _ in range(count)]
        return [(self.prompt(word), self.answer(word)) for word in words]

    async def get_next_item(self) -> str:
        return self.word(self.random, False)

    async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup, list[str]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as model:
            said = await model.completion(
                prompt=self.prompt(item), n=self.config.group_size, max_tokens=len(item) + 1, temperature=1.0
            )
            nodes = model.get_state()["nodes"]
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[self.score(item, choice.text) for choice in said.choices],
        )
        self.metrics["train/exact_match"] = sum(score == 1 for score in group["scores"]) / len(nodes)
        return group, []

    @classmethod
    def score(cls, word: str, said: str) -> float:
        """Return the score, 0 to 1: half for the fraction of correct letters, half for a completely correct answer."""
        right = cls.answer(word)
        placed = sum(one == other for one, other in zip(said, right)) / max(len(said), len(right))
        return 0.5 * placed + 0.5 * (said == right)

    async def solves(self, word: str) -> bool:
        said = await self.server.completion(
            prompt=self.prompt(word), max_tokens=len(word) + 1, temperature=0.0, split="eval"
        )
        return said.choices[0].text == self.answer(word)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        solved = await self.gather_eval(map(self.solves, self.exam))
        self.metrics["eval/exact_match"] = sum(solved) / len(solved)
        await self.evaluate_log({"eval/exact_match": self.metrics["eval/exact_match"]})

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics, self.metrics = {**(wandb_metrics or {}), **self.metrics}, {}
        await super().wandb_log(metrics)


if __name__ == "__main__":
    Reverse.cli()
