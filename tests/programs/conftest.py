from __future__ import annotations

import jax
import pytest

from rlframe.programs import runner


@pytest.fixture(autouse=True, scope="package")
def compile_once(tmp_path_factory):
    """Share compiled functions between runs with equal array shapes, because compilation is slow."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path_factory.mktemp("xla")))
    jax.config.update(names[1], 0.0)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def learning_curves():
    """Turn on the plots of learning curves in a test. By default they are off, because they slow down a small run."""


@pytest.fixture(autouse=True)
def without_learning_curves(request, monkeypatch):
    if "learning_curves" not in request.fixturenames:
        monkeypatch.setattr(runner, "_draw_learning_curve", lambda directory: None)
