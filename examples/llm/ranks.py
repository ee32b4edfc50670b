"""A trainer with two ranks. Rank 0 pulls batches and broadcasts them. Rank 1 waits until the service's step advances.

rlframe serve trajectories &
python examples/llm/ranks.py
"""

import multiprocessing
import sys

from rlframe.trajectories import Group, TrajectoryClient

NUM_RANKS, STEPS = 2, 3
SETTINGS = {"batch_size": 4, "max_token_len": 512, "num_steps": STEPS}  # every rank registers the same


def train(rank, step, batch):
    share = batch[rank::NUM_RANKS]  # this rank's groups; learn from them here
    line = f"rank {rank}, step {step}: {sum(len(group.tokens) for group in share)} sequences\n"
    print(line, end="", flush=True)  # a single write, because the other rank prints too


def rank_0(url, others):
    with TrajectoryClient(url) as client:
        client.register(**SETTINGS)
        for step in range(1, STEPS + 1):
            while (served := client.batch(wait=60)) is None:
                pass
            for other in others:  # the broadcast
                other.send(served.groups)
            train(0, step, served.groups)


def other_rank(rank, url, broadcast):
    with TrajectoryClient(url) as client:
        client.register(**SETTINGS)
        for step in range(1, STEPS + 1):
            client.wait_for_step(step)  # polls GET /status until rank 0 has pulled this step's batch
            train(rank, step, broadcast.recv())


def send_groups(url):
    with TrajectoryClient(url) as client:
        env = client.register_env(desired_name="counting", max_token_length=512, group_size=2, wait=60)
        for _ in range(2 * STEPS):  # two answers to one prompt; the masks hide the prompt tokens
            rows = [[1, 2, 3], [1, 2, 4]]
            masks = [[-100, -100, row[2]] for row in rows]
            client.post(Group(tokens=rows, masks=masks, scores=[1.0, 0.0], env_id=env.env_id))
        client.disconnect_env(env.env_id)


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    context = multiprocessing.get_context("spawn")
    pipes = {rank: context.Pipe() for rank in range(1, NUM_RANKS)}
    ranks = [context.Process(target=other_rank, args=(rank, url, pipe[1])) for rank, pipe in pipes.items()]
    ranks.append(context.Process(target=rank_0, args=(url, [pipe[0] for pipe in pipes.values()])))
    for process in ranks:
        process.start()
    for end in sum(pipes.values(), ()):  # close our copies, so that send or recv raises if the other rank dies
        end.close()
    send_groups(url)
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))  # a negative exit code means killed by a signal
