from __future__ import annotations

import jax
import pytest

from rlframe.programs import runner


@pytest.fixture(autouse=True, scope="package")
def compile_once(tmp_path_factory):
    """Runs of the same shapes share what XLA compiled: most of a small run's time."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path_factory.mktemp("xla")))
    jax.config.update(names[1], 0.0)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def learning_curves():
    """The runs of a test that asks for this draw their learning curves. It takes a fifth of a small run's time."""


@pytest.fixture(autouse=True)
def without_learning_curves(request, monkeypatch):
    if "learning_curves" not in request.fixturenames:
        monkeypatch.setattr(runner, "_draw_learning_curve", lambda directory: None)
