"""Actors step environments and fill a replay buffer. An Evaluator measures returns.

One `Actor.step()` does this for each of its environment pools:

1. The pool's stepper (stepper.py) returns a request with `next_request`: environment ids, timestep, recurrent state.
2. The inferencer returns actions and the next recurrent state.
3. The stepper executes the actions with `act`, and updates its `EpisodeStatistics`.

A `Step` is complete when its environment has returned the next timestep. The stepper of a synchronous pool steps the
environments and adds the step to the replay buffer in `act`. The stepper of an asynchronous pool only sends the actions
in `act`. The next call of `next_request` waits for the environments that finish first, and adds their steps.

`Actor.run()` repeats `step` within its `StepBudget`. An actor of an on-policy agent waits at an `UnrollGate` after each
unroll, until newer parameters are published. `StepBudget` and `UnrollGate` are in pacing.py. An actor claims its rank
from the replay buffer (actor_replay.py). The seeds of its environments depend on this rank.
"""

from rlframe.actors.actor import Actor
from rlframe.actors.evaluator import Evaluator

__all__ = ["Actor", "Evaluator"]
