"""`uvicorn rlframe.trajectories.server:app`: the service, with its settings from the environment (see `Settings`)."""

from __future__ import annotations

from rlframe.trajectories.app import make_app
from rlframe.trajectories.settings import Settings

app = make_app(Settings.from_environment())
