"""Training inside one jitted call, for JAX environments: the topology `fused`.

- `rounds.py`: a round of environment steps and updates, as pure functions.
- `ring.py`: replays in device memory. `sum_tree.py`: their priorities.
- `driver.py`: calls the rounds, and chooses how many of them a call makes.
- `evaluation.py`: plays episodes in jitted calls, for the evaluations of JAX environments in all topologies.
- `seeds.py`: the runs of several seeds in one process.
"""
