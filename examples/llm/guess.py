"""Guess a number in several turns. After each guess, the game answers `<` (the number is smaller), `>` or `=`.

An example of a game is `1-15:8>12<10=`. The model writes each guess and an end token. The model's tokens are never
encoded again. Demonstrations show that a guess is a number in the range, but not how to choose it. Needs no download.

python examples/llm/guess.py evaluate --openai.base_url http://localhost:8001/v1
"""

from __future__ import annotations

import random
from typing import Any

from pydantic import Field

from rlframe.language import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem


class GuessConfig(BaseEnvConfig):
    largest: int = Field(default=15, ge=2, description="Largest number to guess. The smallest is 1.")
    max_turns: int = Field(default=6, ge=1, description="Largest number of guesses per game.")
    seed: int = Field(default=0, description="Seed of the numbers.")


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

    def demonstrations(self, source: random.Random, count: int) -> list[tuple[str, str]]:
        return [self.demonstration(source) for _ in range(count)]

    def demonstration(self, source: random.Random) -> tuple[str, str]:
        """Return an incomplete game and the next guess, of a player that guesses at random."""
        largest, end = self.config.largest, self.tokenizer.decode([self.tokenizer.eos_token_id])
        secret, text = source.randint(1, largest), f"1-{largest}:"
        for _ in range(source.randrange(self.config.max_turns)):
            if (guess := source.randint(1, largest)) != secret:
                text += f"{guess}{end}" + ("<" if secret < guess else ">")
        return text, str(source.randint(1, largest))

    async def play(self, secret: int, **how: Any) -> tuple[Any, float, bool]:
        """Play one game. Return the sequence, its score, and True if the model found the number.

        The score is the fraction of ruled-out numbers, averaged over all turns. The fraction is 1 once the number is
        found. A guess that is not a number ends the game, and the remaining turns count 0.
        """
        largest, turns = self.config.largest, self.config.max_turns
        text, low, high, total, found = f"1-{largest}:", 1, largest, 0.0, False
        async with self.server.managed_server(tokenizer=self.tokenizer) as model:
            for turn in range(turns):
                completion = await model.completion(prompt=text, max_tokens=len(str(largest)) + 1, **how)
                guess = completion.choices[0].text
                if not guess.isdecimal():
                    break
                number = int(guess)
                if number == secret:
                    total, found = total + turns - turn, True
                    break
                if secret < number:
                    high = min(high, number - 1)
                else:
                    low = max(low, number + 1)
                total += 1 - (high - low + 1) / largest
                text += guess + ("<" if secret < number else ">")
            (node,) = model.get_state()["nodes"]
        return node, total / turns, found

    async def collect_trajectory(self, item: int) -> tuple[ScoredDataItem, list[int]]:
        node, score, found = await self.play(item, temperature=1.0)
        self.metrics |= {"train/score": score, "train/found": float(found)}
        sequence = ScoredDataItem(
            tokens=node.tokens, masks=node.masked_tokens, inference_logprobs=node.logprobs, scores=score
        )
        return sequence, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        numbers = range(1, self.config.largest + 1)
        games = await self.gather_eval(self.play(secret, temperature=0.0, split="eval") for secret in numbers)
        results = {
            "eval/score": sum(score for _, score, _ in games) / len(games),
            "eval/found": sum(found for _, _, found in games) / len(games),
        }
        self.metrics |= results
        await self.evaluate_log(results)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics, self.metrics = {**(wandb_metrics or {}), **self.metrics}, {}
        await super().wandb_log(metrics)


if __name__ == "__main__":
    Guess.cli()
