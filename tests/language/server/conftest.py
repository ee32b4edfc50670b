"""Fixtures: a policy server and a client, which all tests share."""

from __future__ import annotations

import pytest

from tests.language.server.serving import client_of, serving_policy


@pytest.fixture(scope="session")
def server():
    with serving_policy() as one:
        yield one


@pytest.fixture(scope="session")
def client(server):
    with client_of(server) as one:
        yield one
