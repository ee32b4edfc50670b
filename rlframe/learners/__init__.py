"""Learners hold the parameters, train them from a replay buffer and publish them.

`Learner.run()` is one loop. learner.py has, in this order: the constructor, an update, the loop, calls of other nodes,
checkpoints. One pass of it:

1. `LearnerReplay.make_dataset` (replay.py) gives a `Batch` of any kind of buffer, and `is_too_old` one that is too old.
2. `LearnerUpdate` (update.py), one jitted call, returns new parameters, the agent's logs, and what actors get of them.
3. `VersionCounter` (versions.py) gives the next version, under which a `Publication` (`rlframe.params`) has them.
4. `LearnerReplay.update_priorities` passes the priorities on; the logger gets a row, if one is due.
5. `Saver` decides whether a checkpoint is due, which `Checkpointer` writes (checkpoints.py).

Meanwhile other nodes call `get_packed` and `publication_reader` (inferencers), `stats` and `finish` (the monitor).
"""

from rlframe.learners.checkpoints import Checkpointer
from rlframe.learners.config import DataConfig, LearnerConfig
from rlframe.learners.learner import Learner

__all__ = ["Checkpointer", "DataConfig", "Learner", "LearnerConfig"]
