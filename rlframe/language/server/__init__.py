"""The policy server: the decode engine behind the OpenAI API, with the learner's newest parameters.

A chat request, `POST /v1/chat/completions`:

1. `app.py` has `requests.py: ChatRequest` read and check the body; `asked` makes tokens of it.
2. `generation.py: Generation` submits it to the `DecodeEngine`, and makes text of the tokens (`TextDecoder`).
3. `replies.py: ChatReplies` makes the answer, whole or as events. A refusal is in OpenAI's format (`errors.py`).

`native.py` has `/generate` in the two forms of vLLM and SGLang. `server.py: PolicyServer` holds the engine, and follows
the learner's parameters.
"""

from rlframe import extras

extras.require("PolicyServer", "trajectories")
with extras.explain_import_error("PolicyServer", "trajectories"):
    from rlframe.language.server.server import PolicyServer, PolicyServerConfig

__all__ = ["PolicyServer", "PolicyServerConfig"]
