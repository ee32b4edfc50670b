"""Nodes on a Ray cluster. For each node, a Ray actor starts the node's process on the actor's machine.

- `cluster.py` connects to Ray or starts it, and places nodes. `StartableRayNode.start` creates a Ray actor and returns
  a `RunningRayNode` for the supervisor.
- `host.py` has the class of this actor, `NodeHost`. It starts the node's process, watches it, and relays calls.
- `params.py` puts each version of the parameters into Ray's object store once. Each Ray node fetches it once.
"""
