"""Arithmetic with a calculator as a tool, in several turns. Needs no download.

    17*23+4?        the question
    calc 17*23      the model calls the calculator, and ends its turn
    =391            the environment returns the result
    calc 391+4
    =395
    395             a turn without a call is the answer

The model's tokens are never encoded again. The environment's tokens are masked, so they are not trained on.

python examples/llm/calculator.py evaluate --openai.base_url http://localhost:8001/v1
"""

from __future__ import annotations

import operator
import random
import re
from typing import Any

from pydantic import Field

from rlframe.language import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem

Question = tuple[int, int, int]
CALL = re.compile(r"calc (-?\d{1,9})([-+*])(-?\d{1,9})")
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class CalculatorConfig(BaseEnvConfig):
    largest: int = Field(default=30, ge=1, description="Largest number in a question.")
    max_calls: int = Field(default=3, ge=0, description="Largest number of calculator calls per question.")
    turn_length: int = Field(default=16, ge=2, description="Largest number of tokens per turn.")
    eval_size: int = Field(default=50, ge=1, description="Number of questions per evaluation.")
    seed: int = Field(default=0, description="Seed of the questions.")


class Calculator(BaseEnv):
    name = "calculator"
    env_config_cls = CalculatorConfig

    @classmethod
    def config_init(cls) -> tuple[CalculatorConfig, list[APIServerConfig]]:
        config = CalculatorConfig(
            group_size=16, max_token_length=128, tokenizer_name="byte", use_wandb=False, total_steps=-1
        )
        return config, [APIServerConfig(base_url="http://localhost:8001/v1", model_name="policy")]

    async def setup(self) -> None:
        self.random = random.Random(self.config.seed)
        self.metrics: dict[str, float] = {}

    def question(self, source: random.Random) -> Question:
        largest = self.config.largest
        return source.randint(1, largest), source.randint(1, largest), source.randint(1, largest)

    async def get_next_item(self) -> Question:
        return self.question(self.random)

    async def solve(self, item: Question, **how: Any) -> tuple[Any, float, int]:
        """Answer one question. Return the sequence, its score and the number of calls."""
        a, b, c = item
        text, calls = f"{a}*{b}+{c}?\n", 0
        async with self.server.managed_server(tokenizer=self.tokenizer) as model:
            while True:
                reply = (await model.completion(prompt=text, max_tokens=self.config.turn_length, **how)).choices[0].text
                call = CALL.fullmatch(reply)
                if call is None or calls == self.config.max_calls:
                    break
                calls += 1
                left, sign, right = call.groups()
                text += f"{reply}\n={OPERATIONS[sign](int(left), int(right))}\n"
            (node,) = model.get_state()["nodes"]
        # A valid call gets a small reward. Otherwise, a model that makes no calls would never learn to make them.
        return node, float(reply == str(a * b + c)) + 0.1 * (calls > 0), calls

    async def collect_trajectory(self, item: Question) -> tuple[ScoredDataItem, list[Question]]:
        node, score, calls = await self.solve(item, temperature=1.0)
        self.metrics |= {"train/score": score, "train/calls": calls}
        sequence = ScoredDataItem(
            tokens=node.tokens, masks=node.masked_tokens, inference_logprobs=node.logprobs, scores=score
        )
        return sequence, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        examiner = random.Random(-1)
        exam = [self.question(examiner) for _ in range(self.config.eval_size)]
        solved = await self.gather_eval(self.solve(item, temperature=0.0, split="eval") for item in exam)
        results = {
            "eval/right": sum(score >= 1 for _, score, _ in solved) / len(solved),
            "eval/calls": sum(calls for _, _, calls in solved) / len(solved),
        }
        self.metrics |= results
        await self.evaluate_log(results)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics, self.metrics = {**(wandb_metrics or {}), **self.metrics}, {}
        await super().wandb_log(metrics)


if __name__ == "__main__":
    Calculator.cli()
