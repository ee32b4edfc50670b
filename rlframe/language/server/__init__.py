"""The policy server implements the OpenAI API, with the decode engine and the learner's newest parameters.

The steps of a chat request, `POST /v1/chat/completions`:

1. `app.py` gets the body as a checked `requests.py: ChatRequest`. Its method `parse` encodes the messages to tokens.
2. `generation.py: Generation` submits the request to the `DecodeEngine` and decodes the tokens to text (`TextDecoder`).
3. `replies.py: ChatReplies` makes the response, as one object or as events. Errors are in OpenAI's format
   (`errors.py`).

`replies.py` also implements `/generate` with the formats of vLLM and SGLang. `server.py: PolicyServer` owns the
engine, and follows the learner's parameters.
"""

from rlframe import extras

extras.require("PolicyServer", "trajectories")
with extras.explain_import_error("PolicyServer", "trajectories"):
    from rlframe.language.server.server import PolicyServer, PolicyServerConfig

__all__ = ["PolicyServer", "PolicyServerConfig"]
