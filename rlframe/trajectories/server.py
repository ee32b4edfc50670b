"""The application for `uvicorn rlframe.trajectories.server:app`; its settings are environment variables.

Without a token (`RLFRAME_TRAJECTORIES_TOKEN_FILE`) it answers requests that came in at loopback only, whatever `--host`
is, unless `RLFRAME_TRAJECTORIES_NO_TOKEN=true` says that other machines need none: see SECURITY.md.
"""

from __future__ import annotations

from rlframe import extras

with extras.explain_import_error("rlframe.trajectories.server", "trajectories"):
    from rlframe.trajectories.service.app import app_from_environment

app = app_from_environment()
