"""Inferencers hold a copy of the parameters and answer timesteps with actions.

Alone, in an actor's process: `Inferencer.inference(env_ids, timestep, state)` fetches newer parameters (`Refresher` of
`rlframe.params`), and makes one jitted call of `Agent.actor_step`.

As a service (`run()`), for actors in other processes of the machine:

1. The actor's `RemoteInferencer` (shared_calls.py) writes the rows into shared memory, and sends which slot it was.
2. `Inferencer.shared_inference` reads them. `Batcher` (batching.py) joins calls that come at the same time.
3. One jitted call answers all. Each caller writes its part into its slot, and returns the version that acted.

A `Refresher` follows the learner's parameters meanwhile. base.py has the protocol that an actor needs.
"""

from rlframe.inferencers.inferencer import Inferencer, InferencerConfig

__all__ = ["Inferencer", "InferencerConfig"]
