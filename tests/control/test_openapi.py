"""Fuzz tests: schemathesis sends valid and invalid requests, and each response must match the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

from tests.extras import needs

needs("trajectories")
import schemathesis
from hypothesis import HealthCheck
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from rlframe.control.app import make_app, serve_control
from tests.control.scripted_coordinator import ScriptedCoordinator

schema = schemathesis.openapi.from_dict(make_app(ScriptedCoordinator()).openapi()).exclude(path="/events/stream")
FUZZ = hypothesis.settings(deadline=None, derandomize=True, max_examples=30, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with serve_control(ScriptedCoordinator(), port=0) as server:
        yield server.url


@pytest.mark.system
@schema.parametrize()
@FUZZ
def test_responses_match_the_openapi_document(case, service):
    response = case.call(base_url=service, timeout=60.0)
    assert response.status_code < 500 or response.status_code == 503, response.text[:500]
    case.validate_response(
        response, checks=[status_code_conformance, content_type_conformance, response_schema_conformance]
    )
