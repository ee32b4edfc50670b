"""The application for `uvicorn rlframe.trajectories.server:app`. Environment variables set its options.

Without a token (`RLFRAME_TRAJECTORIES_TOKEN_FILE`), it answers only requests that arrive at the loopback interface,
even if `--host` is another address. `RLFRAME_TRAJECTORIES_NO_TOKEN=true` allows other machines without a token: see
SECURITY.md.
"""

from __future__ import annotations

from rlframe import extras

with extras.explain_import_error("rlframe.trajectories.server", "trajectories"):
    from rlframe.trajectories.service.app import app_from_environment

app = app_from_environment()
