"""Replay lists of events on atroposlib's server. Read the lists as JSON from stdin, and print the server's answers.

A Python with atroposlib runs this program. `test_random_queues.py` creates the input: a list of queues. Each queue is a
dict with the keys "batch_size" and "events".
"""

import asyncio
import json
import sys

from atroposlib.api import server
from starlette.datastructures import State

SETTINGS = {"wandb_group": "", "wandb_project": "", "max_token_len": 64, "checkpoint_dir": ""}
SETTINGS |= {"save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1000}


async def join(group_size, minimum):
    fields = {"desired_name": "env", "max_token_length": 64, "weight": 1.0, "group_size": group_size}
    registered = await server.register_env_url(server.RegisterEnv(**fields, min_batch_allocation=minimum))
    return registered["env_id"]


async def leave(env_id):
    return (await server.disconnect_env(server.EnvIdentifier(env_id=env_id)))["status"]


async def send(mark, env_id, size):
    tokens = [[mark]] * size
    group = server.ScoredData(tokens=tokens, masks=tokens, scores=[0.0] * size, env_id=env_id)
    answer = await server.scored_data(group)
    return [answer["status"], answer.get("buffer_size", 0)]


async def drain():
    """Return all batches in the order in which they were formed. The server returns the newest batch first."""
    batches = []
    while (batch := (await server.get_batch())["batch"]) is not None:
        batches.append([item["tokens"][0][0] for item in batch])
    status = await server.get_status()
    return [batches[::-1], status["current_step"], status["queue_size"]]


async def play(queue):
    server.app.state = State()
    await server.register(server.Registration(**SETTINGS, batch_size=queue["batch_size"]))
    await server.get_batch()
    return [await EVENTS[what](*how) for what, *how in queue["events"]]


EVENTS = {"join": join, "leave": leave, "send": send, "drain": drain}

if __name__ == "__main__":
    print(json.dumps([asyncio.run(play(queue)) for queue in json.load(sys.stdin)]))
