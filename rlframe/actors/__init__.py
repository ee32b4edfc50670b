"""Actors step environments with an inferencer and fill a replay buffer; an Evaluator measures returns.

One `Actor.step()`:

1. `next_request` of its stepper (stepper.py, one for each pool): environment ids, timestep, recurrent state.
2. The inferencer answers with actions and the next state.
3. `act` of the stepper carries the actions out. `EpisodeStatistics` counts.

When the environments have answered, the completed `Step` is added to the replay buffer. A synchronous pool is stepped,
and its step added, in `act`. An asynchronous pool only gets its actions there. The next `next_request` waits for the
environments that answer first, and adds their steps.

`Actor.run()` repeats this, as long as its `StepBudget` lasts. An actor of an on-policy agent waits at an `UnrollGate`
after each unroll for a newer version of the parameters (both in gates.py). Its rank, from which its seeds follow, is
claimed from the replay buffer (`ActorReplay`, replay.py).
"""

from rlframe.actors.actor import Actor
from rlframe.actors.evaluator import Evaluator

__all__ = ["Actor", "Evaluator"]
