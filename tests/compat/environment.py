"""Two small environments derived from atroposlib's BaseEnv. A Python with atroposlib runs this file in `serve` mode.

A question is two digits. The score of an answer is 1 if the answer is the sum of the digits.
"""

import logging
import os
import random
import socket
import sys

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup, ScoredDataItem
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer


class Sums(BaseEnv):
    """An environment that collects single trajectories. The default code of BaseEnv groups the trajectories."""

    name = "sums"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            group_size=4, use_wandb=False, wandb_name=cls.name, steps_per_eval=0, max_token_length=64
        )
        return config, [APIServerConfig(model_name="stub", base_url="http://127.0.0.1:1/v1", api_key="x")]

    async def setup(self):
        self.random = random.Random(0)

    async def get_next_item(self):
        return self.random.randrange(10), self.random.randrange(10)

    async def answer(self, item):
        chat = [{"role": "user", "content": f"{item[0]} + {item[1]}"}]
        completion = await self.server.chat_completion(messages=chat, n=1, max_tokens=8)
        chat.append({"role": "assistant", "content": completion.choices[0].message.content})
        return tokenize_for_trainer(self.tokenizer, chat), chat

    async def collect_trajectory(self, item):
        tokenized, chat = await self.answer(item)
        score = float(chat[-1]["content"] == str(sum(item)))
        trajectory = ScoredDataItem(tokens=tokenized["tokens"], masks=tokenized["masks"], scores=score, messages=chat)
        return trajectory, []

    async def evaluate(self, *args, **kwargs):
        pass


class PairsOfSums(Sums):
    """An environment that sends lists of groups, with log-probabilities and overrides, to /scored_data_list."""

    name = "pairs"

    async def collect_trajectories(self, item):
        groups = []
        for _ in range(2):
            group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[], overrides=[])
            for _ in range(self.config.group_size):
                tokenized, chat = await self.answer(item)
                group["tokens"].append(tokenized["tokens"])
                group["masks"].append(tokenized["masks"])
                group["scores"].append(self.random.random())
                group["inference_logprobs"].append([1.0 if mask == -100 else -0.5 for mask in tokenized["masks"]])
                group["overrides"].append({"set_advantage_to_zero": chat[-1]["content"] == "0"})
            group["group_overrides"] = {"question": list(item)}
            groups.append(group)
        return groups, []


def resolve(name, address):
    """Make Python resolve a host name to the given address, as the DNS of a container network would."""
    ask = socket.getaddrinfo
    socket.getaddrinfo = lambda host, *how, **more: ask(address if host == name else host, *how, **more)


if __name__ == "__main__":
    if "RESOLVES" in os.environ:
        resolve(*os.environ["RESOLVES"].split("="))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    {"sums": Sums, "pairs": PairsOfSums}[sys.argv.pop(1)].cli()
