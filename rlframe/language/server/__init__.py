"""The policy server: the decode engine behind the OpenAI API, with the learner's newest parameters."""

from rlframe import extras

extras.require("PolicyServer", "trajectories")
with extras.needed("PolicyServer", "trajectories"):
    from rlframe.language.server.server import PolicyServer, PolicyServerConfig

__all__ = ["PolicyServer", "PolicyServerConfig"]
