"""The policy server: the decode engine behind the OpenAI API, with a learner's newest parameters. See `docs/llm.md`."""

from rlframe import extras

extras.require("PolicyServer", "trajectories")
with extras.needed("PolicyServer", "trajectories"):
    from rlframe.language.server.server import PolicyServer, PolicyServerConfig

__all__ = ["PolicyServer", "PolicyServerConfig"]
