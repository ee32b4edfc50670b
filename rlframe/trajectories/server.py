"""`uvicorn rlframe.trajectories.server:app`: the service, with its settings from the environment (see `Settings`)."""

from __future__ import annotations

import sys

from rlframe.http.token_file import no_token_means
from rlframe.trajectories.service.app import make_app
from rlframe.trajectories.service.settings import CAN, Settings

_settings = Settings.from_environment()
if _settings.no_token:
    print(no_token_means(CAN), file=sys.stderr)
app = make_app(_settings)
