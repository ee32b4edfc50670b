"""Training inside one jitted call, for JAX environments: the topology `fused`.

- `rounds.py`: a round of environment steps and updates, as pure functions, and the loop that makes rounds.
- `replay.py`: the protocol of the replays in device memory. `unroll_queue.py`: the replay of agents such as PPO.
  `ring.py`: the replay of agents such as DQN. `sum_tree.py`: its priorities. `memory.py`: the memory that they need.
- `driver.py`: calls the rounds, and gives their results to the Learner.
- `call_length.py`: chooses the number of rounds of a call.
- `evaluation.py`: plays episodes in jitted calls, for the evaluations of JAX environments in all topologies.
- `seeds.py`: the runs of several seeds in one process.
"""
