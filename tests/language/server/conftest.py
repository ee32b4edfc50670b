"""Fixtures: a policy server and a client, which all tests of a module share."""

from __future__ import annotations

import pytest

from tests.language.server.serving import client_of, serving_policy


@pytest.fixture(scope="module")
def server():
    with serving_policy() as one:
        yield one


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as one:
        yield one
