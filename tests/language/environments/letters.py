"""An environment with a command line. Tests run this file in another process."""

from __future__ import annotations

import logging

from pydantic import Field

from rlframe.language.environments import APIServerConfig, BaseEnvConfig
from tests.language.environments.running import Letters


class LettersConfig(BaseEnvConfig):
    words: list[str] = Field(default=["a"], description="prompts of the evaluation")
    weight: float | None = None
    gives_no_group: bool = Field(default=False, description="True: no item gives a group")


class CommandLine(Letters):
    env_config_cls = LettersConfig

    @classmethod
    def config_init(cls):
        return LettersConfig(group_size=2, max_token_length=64, use_wandb=True), [APIServerConfig(model_name="m")]

    async def collect_trajectories(self, item):
        return (None, []) if self.config.gives_no_group else await super().collect_trajectories(item)

    async def evaluate(self, *args, **kwargs):
        answers = await self.gather_eval(
            self.server.completion(prompt=word, split="eval") for word in self.config.words
        )
        texts = [answer.choices[0].text for answer in answers]
        logging.info("evaluated %d", len(texts))
        self.result = float(len(texts))
        samples = [{"answer": text} for text in texts]
        await self.evaluate_log({"eval/answers": self.result}, samples=samples, start_time=1.0, end_time=3.0)

    async def wandb_log(self, wandb_metrics=None):
        await super().wandb_log({**(wandb_metrics or {}), "train/requests": float(self.number)})


if __name__ == "__main__":
    CommandLine.cli()
