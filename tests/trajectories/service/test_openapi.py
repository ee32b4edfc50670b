"""Test that answers match the OpenAPI document. schemathesis generates valid and invalid requests from the document."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from rlframe.trajectories.config import Settings
from rlframe.trajectories.service.app import make_app
from tests.trajectories.serving import ServiceProcess, running_service

schema = schemathesis.openapi.from_dict(make_app(Settings(store="memory")).openapi())
DESCRIBED = [status_code_conformance, content_type_conformance, response_schema_conformance]
FUZZ = hypothesis.settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[ServiceProcess]:
    with running_service(tmp_path_factory.mktemp("openapi")) as running:
        yield running


@schemathesis.serializer("application/msgpack")
def _to_msgpack(_, value):
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:  # The value has an integer of more than 64 bits.
        return b"\xc1"


def check(service: ServiceProcess, case: schemathesis.Case) -> None:
    if case.query and "wait" in case.query:
        case.query["wait"] = 0
    response = case.call(base_url=service.url, timeout=60.0)
    assert response.status_code < 500 or response.status_code == 503, response.text[:500]
    case.validate_response(response, checks=DESCRIBED)


@pytest.mark.system
@schema.parametrize()
@hypothesis.settings(FUZZ, max_examples=300)
def test_answers_match_openapi_document(case, service):
    check(service, case)
