"""The policy server: the decode engine behind the OpenAI API, with a learner's newest parameters. See `docs/llm.md`."""

from rlframe import extras

extras.require("rlframe.policy_server", "trajectories")
with extras.needed("rlframe.policy_server", "trajectories"):
    from rlframe.policy_server.config import PolicyServerConfig
    from rlframe.policy_server.server import PolicyServer

__all__ = ["PolicyServer", "PolicyServerConfig"]
