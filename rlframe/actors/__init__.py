"""Actors step environments with an inferencer and fill a replay buffer; an Evaluator measures returns.

One `Actor.step()`:

1. Its stepper (stepper.py, one for each pool) returns a `Request`: environment ids, timestep, recurrent state.
2. The inferencer answers with actions and the next state.
3. The stepper steps the environments, and adds the completed `Step` to the replay buffer. `EpisodeStatistics` counts.

`Actor.run()` repeats this. An actor of an on-policy agent waits after each unroll for a newer version of the parameters
(unroll_gate.py). Its rank, from which its seeds follow, is claimed from the replay buffer (ranks.py).
"""

from rlframe.actors.actor import Actor
from rlframe.actors.evaluator import Evaluator

__all__ = ["Actor", "Evaluator"]
