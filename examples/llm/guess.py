"""Guess a number in several turns: after each guess the game says `<` (it is smaller), `>` or `=`. Needs no download.

A game reads `1-15:8>12<10=`. The model writes the guesses and ends each; what it wrote is never encoded again.

python examples/llm/guess.py evaluate --openai.base_url http://localhost:8001/v1
"""

from __future__ import annotations

import random
from typing import Any

from pydantic import Field

from rlframe.trajectories.base_env import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem


class GuessConfig(BaseEnvConfig):
    largest: int = Field(default=15, ge=2, description="of the numbers to guess; the smallest is 1")
    max_turns: int = Field(default=6, ge=1, description="guesses of a game")
    seed: int = Field(default=0, description="of the numbers")


class Guess(BaseEnv):
    name = "guess"
    env_config_cls = GuessConfig

    @classmethod
    def config_init(cls) -> tuple[GuessConfig, list[APIServerConfig]]:
        config = GuessConfig(group_size=16, max_token_length=48, tokenizer_name="byte", use_wandb=False, total_steps=-1)
        return config, [APIServerConfig(base_url="http://localhost:8001/v1", model_name="policy")]

    async def setup(self) -> None:
        self.random = random.Random(self.config.seed)
        self.metrics: dict[str, float] = {}

    async def get_next_item(self) -> int:
        return self.random.randint(1, self.config.largest)

    async def play(self, secret: int, **how: Any) -> tuple[Any, float]:
        """A game: its sequence, and its score, from 1 for the first guess down to 0 for a number that was not found."""
        text = f"1-{self.config.largest}:"
        async with self.server.managed_server(tokenizer=self.tokenizer) as model:
            for turn in range(self.config.max_turns):
                said = await model.completion(prompt=text, max_tokens=len(str(self.config.largest)) + 1, **how)
                guess = said.choices[0].text
                if not guess.isdecimal():
                    score = -0.5  # worse than not to find it: a guess is a number
                    break
                if int(guess) == secret:
                    score = 1.0 - turn / self.config.max_turns
                    break
                text += guess + ("<" if secret < int(guess) else ">")
            else:
                score = 0.0
            (node,) = model.get_state()["nodes"]
        return node, score

    async def collect_trajectory(self, item: int) -> tuple[ScoredDataItem, list[int]]:
        node, score = await self.play(item, temperature=1.0)
        self.metrics["train/score"] = score
        sequence = ScoredDataItem(
            tokens=node.tokens, masks=node.masked_tokens, inference_logprobs=node.logprobs, scores=score
        )
        return sequence, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        numbers = range(1, self.config.largest + 1)
        games = await self.gather_eval(self.play(secret, temperature=0.0, split="eval") for secret in numbers)
        scores = [score for _, score in games]
        results = {
            "eval/found": sum(score > 0 for score in scores) / len(scores),
            "eval/score": sum(scores) / len(scores),
        }
        self.metrics |= results
        await self.evaluate_log(results)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics, self.metrics = {**(wandb_metrics or {}), **self.metrics}, {}
        await super().wandb_log(metrics)


if __name__ == "__main__":
    Guess.cli()
