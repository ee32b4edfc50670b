"""Nodes that run beside Ray actors, on any machine of a Ray cluster.

- `cluster.py` connects to Ray, or starts one, and says on which machines nodes may be. `StartableRayNode.start` makes a
  Ray actor, and returns a `RunningRayNode`, which the supervisor sees.
- `host.py`: in that actor a `NodeHost` starts the node's process beside itself, watches it, and passes calls on.
- `params.py`: a version of the parameters is put into Ray's object store once, and fetched once by each Ray node.
"""
