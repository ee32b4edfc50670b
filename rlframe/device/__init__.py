"""Training inside one jitted call, for JAX environments: the topology `fused`.

- `rounds.py`: a round of environment steps and updates, as pure functions, and the loop that makes rounds.
- `replay.py`: the replay of agents such as PPO. `ring.py`: the replay of agents such as DQN, and its priorities.
- `driver.py`: chooses the number of rounds of a call, calls them, and gives their results to the Learner.
- `evaluation.py`: plays episodes in jitted calls, for the evaluations of JAX environments in all topologies.
- `seeds.py`: the runs of several seeds in one process.
"""
