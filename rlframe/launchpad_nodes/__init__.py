"""Nodes of plain `lp.launch`, without an engine: how they are pickled, started and guarded.

A script imports rlframe and Launchpad, and calls `lp.launch(program)`:

1. `import_hook.py`, which `import rlframe` calls, has each node pickled by `node.py` once Launchpad is imported.
2. The process of a node unpickles it with `node.restore`, which starts the guard of the node first (`guard.py`).
3. The node raises, or is killed. Its guard names it, asks the launcher to stop, and kills what does not end.

This package is below `handles`: any process that imports rlframe may be such a node. `engines/launchpad.py` runs the
nodes of a program under rlframe's own supervisor, without guards.
"""
