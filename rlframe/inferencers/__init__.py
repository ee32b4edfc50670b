"""An Inferencer has a copy of the parameters, and returns actions for timesteps.

An inline Inferencer runs in the actor's process: `Inferencer.inference(env_ids, timestep, state)` fetches newer
parameters (`Refresher` of `rlframe.params`), and makes one jitted call of `Agent.actor_step`.

A service (`run()`) answers actors in other processes of the machine:

1. The actor's `RemoteInferencer` (shared_calls.py) writes the rows to a slot of shared memory, and sends the slot's
   number.
2. `Inferencer.shared_inference` reads the rows. `Batcher` (batching.py) joins simultaneous calls into a batch.
3. One jitted call answers the batch. Each actor's part of the answer is written to its slot, and the actor receives the
   version of the parameters.

A `Refresher` fetches the learner's parameters at the same time. base.py defines the protocol that an actor uses.
"""

from rlframe.inferencers.inferencer import Inferencer, InferencerConfig

__all__ = ["Inferencer", "InferencerConfig"]
