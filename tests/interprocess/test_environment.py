import os

import pytest

from rlframe.interprocess.environment import environment_variable

NAME = "RLFRAME_TEST_VARIABLE"


@pytest.mark.parametrize("before", ["old", None])
def test_variable_is_restored_after_the_block(monkeypatch, before) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)
    with pytest.raises(KeyError), environment_variable(NAME, "new"):
        assert os.environ[NAME] == "new"
        raise KeyError
    assert os.environ.get(NAME) == before
