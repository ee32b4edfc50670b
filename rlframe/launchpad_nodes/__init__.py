"""Support for programs that start with plain `lp.launch`, without an engine: each node gets a guard process.

A script imports rlframe and Launchpad, and calls `lp.launch(program)`:

1. `import rlframe` calls `import_hook.py`. After the import of Launchpad, it registers `node.py` to pickle nodes.
2. The process of a node unpickles the node with `node.restore`, which first starts the node's guard (`guard.py`).
3. If the node raises or is killed, its guard prints the node's name, stops the launcher, and kills processes that do
   not end in time.

Any process that imports rlframe can be such a node, so this package must not import `rlframe.handles` or modules that
import `rlframe.handles`. `engines/launchpad.py` needs no guards: it runs programs under rlframe's own supervisor.
"""
