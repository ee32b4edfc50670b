"""Add two numbers: the correct answer to `27+15=` is `42`. Needs no download.

python examples/llm/add.py evaluate --openai.base_url http://localhost:8001/v1
"""

from __future__ import annotations

import random
from typing import Any

from pydantic import Field

from rlframe.language import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

Sum = tuple[int, int]


class AddConfig(BaseEnvConfig):
    largest: int = Field(default=49, ge=1, description="Largest number to add. The smallest is 0.")
    eval_size: int = Field(default=100, ge=1, description="Number of held-out sums per evaluation.")
    seed: int = Field(default=0, description="Seed of the training sums.")


def held_out(numbers: Sum) -> bool:
    """Return True if a sum is only for evaluations. About one in ten is, independent of the seed."""
    return (31 * numbers[0] + 17 * numbers[1]) % 10 == 0


class Add(BaseEnv):
    name = "add"
    env_config_cls = AddConfig

    @classmethod
    def config_init(cls) -> tuple[AddConfig, list[APIServerConfig]]:
        config = AddConfig(group_size=16, max_token_length=24, tokenizer_name="byte", use_wandb=False, total_steps=-1)
        return config, [APIServerConfig(base_url="http://localhost:8001/v1", model_name="policy")]

    @staticmethod
    def prompt(numbers: Sum) -> str:
        return f"{numbers[0]}+{numbers[1]}="

    @staticmethod
    def answer(numbers: Sum) -> str:
        return str(sum(numbers))

    async def setup(self) -> None:
        self.random = random.Random(self.config.seed)
        examiner = random.Random(0)
        self.exam = [self.sum(examiner, True) for _ in range(self.config.eval_size)]
        self.metrics: dict[str, float] = {}

    def sum(self, source: random.Random, for_exam: bool) -> Sum:
        while True:
            numbers = source.randint(0, self.config.largest), source.randint(0, self.config.largest)
            if held_out(numbers) == for_exam:
                return numbers

    def demonstrations(self, source: random.Random, count: int) -> list[tuple[str, str]]:
        sums = [self.sum(source, False) for _ in range(count)]
        return [(self.prompt(numbers), self.answer(numbers)) for numbers in sums]

    async def get_next_item(self) -> Sum:
        return self.sum(self.random, False)

    async def collect_trajectories(self, item: Sum) -> tuple[ScoredDataGroup, list[Sum]]:
        length = len(self.answer(item)) + 1  # one more for the end token
        async with self.server.managed_server(tokenizer=self.tokenizer) as model:
            completion = await model.completion(
                prompt=self.prompt(item), n=self.config.group_size, max_tokens=length, temperature=1.0
            )
            nodes = model.get_state()["nodes"]
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[float(choice.text == self.answer(item)) for choice in completion.choices],
        )
        self.metrics["train/exact_match"] = sum(group["scores"]) / len(nodes)
        return group, []

    async def solves(self, numbers: Sum) -> bool:
        length = len(self.answer(numbers)) + 1
        completion = await self.server.completion(
            prompt=self.prompt(numbers), max_tokens=length, temperature=0.0, split="eval"
        )
        return completion.choices[0].text == self.answer(numbers)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        solved = await self.gather_eval(map(self.solves, self.exam))
        self.metrics["eval/exact_match"] = sum(solved) / len(solved)
        await self.evaluate_log({"eval/exact_match": self.metrics["eval/exact_match"]})

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics, self.metrics = {**(wandb_metrics or {}), **self.metrics}, {}
        await super().wandb_log(metrics)


if __name__ == "__main__":
    Add.cli()
