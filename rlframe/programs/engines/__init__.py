"""What runs the nodes of a program: see `rlframe.programs.topologies.Engine`."""

from __future__ import annotations

# The groups whose nodes save when they end. Of a run that was stopped, everything is saved only if they ended well.
SAVING_GROUPS = ("learner", "replay", "coordinator")
