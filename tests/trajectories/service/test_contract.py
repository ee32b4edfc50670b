"""Check that the service answers like atroposlib's server, and that it works in cases in which that server fails.

The tests start the real command, with a SQLite store.
"""

from __future__ import annotations

import gzip
import json
import zlib

import httpx
import msgspec
import pytest

from tests.trajectories.api import ENV, ITEM_KEYS, SETTINGS, Api, fresh_name, group, marks_of
from tests.trajectories.serving import running_service


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contract")
    with running_service(folder) as service, httpx.Client(base_url=service.url, timeout=60) as client:
        yield client


@pytest.fixture
def api(client):
    return Api(client, fresh_name())


@pytest.fixture(params=["default", "named"])
def either(client, request):
    """Return a client for an empty run: once for the default run, and once for a named run."""
    if request.param == "named":
        return Api(client, fresh_name())
    assert client.get("/reset_data").status_code == 200
    return Api(client)


def error_path(answer):
    """Check that an answer has status 422. Return the path of the invalid field."""
    assert answer.status_code == 422, answer.text
    detail = answer.json()["detail"]
    assert all(set(one) == {"loc", "msg", "type"} for one in detail)
    return detail[0]["loc"]


# Tests of requests before registration


def test_request_to_root_path_returns_message(client):
    assert "message" in client.get("/").json()


def test_requests_before_registration_are_answered(either):
    assert either.get("/wandb_info").json() == {"group": None, "project": None}
    assert either.get("/info").json() == {"batch_size": -1, "max_token_len": -1}
    status = either.get("/status").json()
    assert (status["current_step"], status["queue_size"]) == (0, 0)
    answer = either.get("/batch")
    assert answer.status_code == 200
    body = answer.json()
    assert (body["status"], body["batch"]) == ("error", None)
    assert isinstance(body["message"], str)
    assert either.join() == {"status": "wait for trainer to start"}


def test_latest_example_has_empty_lists_at_first(api):
    example = api.get("/latest_example").json()
    assert {"tokens", "masks", "scores", "advantages", "ref_logprobs", "messages"} < set(example)
    assert all(value == [] for value in example.values())


# Tests of registration


def test_register_returns_128_bit_uuid(either):
    answer = either.post("/register", SETTINGS).json()
    assert set(answer) == {"uuid"}
    assert 0 < answer["uuid"] < 2**128 and answer["uuid"] > 2**64
    assert either.get("/wandb_info").json() == {"group": "group", "project": "project"}
    assert either.get("/info").json() == {"batch_size": 4, "max_token_len": 512}
    assert either.get("/status").json()["current_step"] == 3


@pytest.mark.parametrize("missing", ["batch_size", "wandb_group", "num_steps"])
def test_register_error_names_missing_field(api, missing):
    assert error_path(api.post("/register", {k: v for k, v in SETTINGS.items() if k != missing})) == ["body", missing]


def test_environments_wait_for_first_batch_request(either):
    either.register()
    assert either.join() == {"status": "wait for trainer to start"}
    assert either.get("/batch").json() == {"batch": None}
    first = either.join()
    assert first.pop("resume_token")
    assert first == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "env_0",
        "checkpoint_dir": "checkpoints",
        "starting_step": 3,
        "checkpoint_interval": 10,
        "num_steps": 1000,
    }
    assert either.join()["wandb_name"] == "env_1"
    assert either.join(desired_name="other")["wandb_name"] == "other_0"


def test_disconnect_env_returns_failure_for_unknown_environment(api):
    api.started().join()
    assert api.post("/disconnect-env", {"env_id": 0}).json() == {"status": "success"}
    failure = api.post("/disconnect-env", {"env_id": 7})
    assert failure.status_code == 200
    assert failure.json()["status"] == "failure" and "7" in failure.json()["error"]


@pytest.mark.parametrize(
    "fields",
    [
        {"min_batch_allocation": 1.5},
        {"group_size": 0},
        {"max_token_length": -1},
        {"weight": "heavy"},
        {"group_size": "many"},
        {"desired_name": 3},
    ],
)
def test_register_env_error_names_invalid_field(api, fields):
    assert error_path(api.started().post("/register-env", {**ENV, **fields})) == ["body", *fields]


# Tests of groups and batches


def test_group_is_served_with_all_keys(either):
    either.started().join()
    sent = group(
        mark=7,
        advantages=[[0.5], [0.25, 1.0]],
        inference_logprobs=[[1.0], [-0.5, -0.125]],
        messages=[[{"role": "user", "content": "hé"}], [{"role": "user", "content": "b", "reward": 1}]],
        overrides=[{"a": 1}, {}],
        group_overrides={"b": [1]},
        images={"any": "thing"},
        generation_params={"temperature": 1.0},
        distill_token_ids=[[[1, 2]], [[3, 4], [5, 6]]],
        distill_logprobs=[[[0.5, 0.5]], [[0.5, 0.5], [0.25, 0.75]]],
        env_id=0,
    )
    assert either.post("/scored_data", sent).json() == {"status": "received"}
    assert either.get("/batch").json() == {"batch": None}
    assert either.post("/scored_data", group(mark=8)).json() == {"status": "received"}
    first, second = either.get("/batch").json()["batch"]
    assert first == {**sent, "ref_logprobs": None}
    assert set(second) == ITEM_KEYS
    assert {name for name, value in second.items() if value is None} == ITEM_KEYS - {"tokens", "masks", "scores"}
    status = either.get("/status").json()
    assert (status["current_step"], status["queue_size"]) == (4, 0)


def test_unknown_keys_are_dropped_and_the_rest_is_unchanged(api):
    api.started()
    api.send(1, whatever=[1, 2], policy_version=None)
    api.send(2, tokens=[[2] * 3, [5, 6]], masks=[[1, 2, 3], [4, -100]], surprise="x")
    first, second = api.get("/batch").json()["batch"]
    assert set(first) == ITEM_KEYS | {"policy_version"}
    assert set(second) == ITEM_KEYS
    assert second["masks"] == [[1, 2, 3], [4, -100]]


def test_undersized_groups_are_buffered(either):
    either.started().join(group_size=4)
    answer = either.post("/scored_data", group(3, env_id=0)).json()
    assert answer == {"status": "buffered", "buffer_size": 3}
    assert either.get("/batch").json() == {"batch": None}
    assert either.post("/scored_data", group(1, env_id=0)).json() == {"status": "buffered", "buffer_size": 0}
    assert [len(item["tokens"]) for item in either.get("/batch").json()["batch"]] == [3, 1]


def test_list_of_groups_is_accepted(either):
    either.started().join(group_size=2)
    answer = either.post("/scored_data_list", [group(mark=1, env_id=0), group(mark=2)]).json()
    assert answer == {"status": "received", "groups_processed": 2}
    assert either.marks() == [1, 2]
    undersized = [group(1, env_id=0), group(2, env_id=0)]
    answer = either.post("/scored_data_list", undersized).json()
    assert answer == {"status": "received", "groups_processed": 2, "buffered": 1, "last_buffer_size": 1}
    assert either.post("/scored_data_list", []).json() == {"status": "received", "groups_processed": 0}


def test_latest_example_returns_newest_group_even_after_its_delivery(api):
    api.started()
    api.send(1, 2)
    assert api.get("/latest_example").json()["tokens"][0] == [2]
    assert api.marks() == [1, 2]
    assert api.get("/latest_example").json()["tokens"][0] == [2]


def test_status_env_accepts_id_in_body_and_query(either):
    either.started()
    either.join(weight=3.0)
    either.join(weight=1.0, min_batch_allocation=0.25)
    either.send(1, 2, 3, env_id=0)
    by_body = either.get("/status-env", json={"env_id": 0})
    expected = {
        "current_step": 3,
        "queue_size": 3,
        "env_weight": 0.75,
        "unallocated_fraction": 0.75,
        "self_queue_size": 3,
        "max_group_size": 2,
        "hold": False,
    }
    assert by_body.json() == expected
    assert either.get("/status-env", params={"env_id": 0}).json() == expected
    assert either.get("/status-env", params={"env_id": 1}).json()["env_weight"] == 0.25


def test_status_env_of_unknown_environment_is_refused(api):
    api.started()
    assert api.get("/status-env", params={"env_id": 5}).status_code == 404
    assert error_path(api.get("/status-env")) == ["query", "env_id"]
    assert error_path(api.get("/status-env", content=b'{"env_id": "x"}')) == ["body", "env_id"]


def test_reset_returns_plain_text_and_deletes_everything(either):
    either.started().join()
    either.send(1, 2, 3)
    answer = either.get("/reset_data")
    assert (answer.status_code, answer.text) == (200, "Reset successful")
    assert answer.headers["content-type"].startswith("text/plain")
    assert either.get("/info").json()["batch_size"] == -1
    assert either.get("/status").json()["queue_size"] == 0
    assert either.post("/reset_data").text == "Reset successful"


def test_gzip_requests_and_answers_are_supported(api):
    api.started()
    body = gzip.compress(json.dumps(group(mark=1)).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    assert api.post("/scored_data", content=body, headers=headers).json() == {"status": "received"}
    bad = api.post("/scored_data", content=b"no gzip", headers=headers)
    assert (bad.status_code, "gzip" in bad.text) == (400, True)
    cut = api.post("/scored_data", content=body[:-9], headers=headers)
    assert cut.status_code == 400
    long = [[1] * 2000] * 2
    api.send(2, tokens=long, masks=long)
    plain = api.get("/status", headers={"Accept-Encoding": "gzip"})
    # The answer is not compressed, because it is shorter than 1,000 bytes.
    assert "content-encoding" not in plain.headers
    with api.client.stream("GET", api.prefix + "/batch", headers={"Accept-Encoding": "gzip"}) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        raw = b"".join(answer.iter_raw())
    assert marks_of(json.loads(zlib.decompress(raw, wbits=31))["batch"]) == [1, 1]
    assert len(raw) < 2000


# Tests of cases in which atroposlib's server fails


def test_batches_are_delivered_one_at_a_time_oldest_first(api):
    api.started()
    api.send(1, 2, 3, 4, 5)
    assert api.marks() == [1, 2]
    status = api.get("/status").json()
    assert (status["current_step"], status["queue_size"]) == (4, 3)
    assert api.marks() == [3, 4]
    assert api.marks() is None


def test_groups_before_registration_are_kept(api):
    api.send(1, 2)
    assert api.get("/status").json()["queue_size"] == 2
    api.register()
    assert api.marks() == [1, 2]


def test_same_registration_is_confirmed_and_different_registration_resets_run(api):
    first = api.register()
    api.started().join()
    api.send(1)
    assert api.register() == first  # as a second rank of the same trainer does
    assert api.get("/status").json()["queue_size"] == 1
    assert api.register(batch_size=8) != first
    status = api.get("/status").json()
    assert (status["queue_size"], status["epoch"]) == (0, 1)


def test_group_that_fits_into_no_batch_is_set_aside_and_other_groups_are_served(api):
    # This group of 5 sequences is sent before the trainer registers with a batch size of 4.
    api.post("/scored_data", group(5, mark=9))
    api.send(1, 2)
    api.register()
    assert api.marks() == [1, 2]
    status = api.get("/status").json()
    assert status["set_aside"] == 1
    assert any("larger than batch_size 4" in why for why in status["waiting_for"])


WRONG = {
    "more masks than tokens": (dict(masks=[[1], [1, 2], [3]]), ["masks"]),
    "ragged masks": (dict(masks=[[1], [1]]), ["masks", 1]),
    "too few scores": (dict(scores=[0.5]), ["scores"]),
    "ragged inference_logprobs": (dict(inference_logprobs=[[0.5], [0.5]]), ["inference_logprobs", 1]),
    "ragged ref_logprobs": (dict(ref_logprobs=[[0.5]]), ["ref_logprobs"]),
    "no sequence": (dict(tokens=[], masks=[], scores=[]), ["tokens"]),
    "an empty sequence": (dict(tokens=[[], [1, 2]], masks=[[], [1, 2]]), ["tokens", 0]),
    "too large": (dict(group(5)), ["tokens"]),
    "text for a token": (dict(tokens=[["a"], [1, 2]]), ["tokens", 0, 0]),
    "a fractional token": (dict(tokens=[[1], [1, 2.5]]), ["tokens", 1, 1]),
    "a token beyond int32": (dict(tokens=[[1], [1, 2**31]]), ["tokens", 1, 1]),
    "a negative env_id": (dict(env_id=-1), ["env_id"]),
    "a message without content": (dict(messages=[[{"role": "user"}]]), ["messages", 0, 0]),
    "distillation for fewer sequences": (dict(distill_token_ids=[[[1]]]), ["distill_token_ids"]),
    "null for tokens": (dict(tokens=None), ["tokens"]),
}


@pytest.mark.parametrize("fields, where", WRONG.values(), ids=WRONG)
def test_invalid_group_is_refused_with_path_to_field(api, fields, where):
    api.started()
    wrong = {**group(), **fields}
    assert error_path(api.post("/scored_data", wrong)) == ["body", *where]
    assert error_path(api.post("/scored_data_list", [group(), wrong])) == ["body", 1, *where]
    assert api.get("/status").json()["queue_size"] == 0


@pytest.mark.parametrize("advantages", [[[0.5, 0.5], [0.5, 0.5]], [[0.5]], [[], [1.0, 2.0]], [[1.0]] * 3])
def test_advantages_may_have_any_length_but_must_be_finite(api, advantages):
    """The service follows atroposlib's server."""
    api.started(batch_size=2)
    assert api.post("/scored_data", group(advantages=advantages)).json() == {"status": "received"}
    assert api.get("/batch").json()["batch"][0]["advantages"] == advantages
    wrong = json.dumps(group(advantages=[[0.5, 0.5], [0.5, "@"]])).replace('"@"', "NaN")
    assert error_path(api.post("/scored_data", content=wrong)) == ["body", "advantages", 1, 1]


def test_boolean_scores_become_one_and_zero(api):
    """Scores can be booleans, as in atroposlib's server. Trainers receive numbers."""
    api.started(batch_size=2)
    sent = group(scores=[True, False], images=[True])
    for packed in (False, True):
        body = msgspec.msgpack.encode(sent) if packed else json.dumps(sent)
        kind = {"Content-Type": "application/msgpack" if packed else "application/json"}
        assert api.post("/scored_data", content=body, headers=kind).json() == {"status": "received"}
        (item,) = api.get("/batch").json()["batch"]
        assert str(item["scores"]) == "[1.0, 0.0]" and item["images"] == [True]
    assert error_path(api.post("/scored_data", group(scores=[True, "1"]))) == ["body", "scores", 1]
    assert error_path(api.post("/scored_data", group(scores=[True]))) == ["body", "scores"]
    assert error_path(api.post("/scored_data", group(tokens=[[True], [1, 2]]))) == ["body", "tokens", 0, 0]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-3.5e38", "9" * 39])
@pytest.mark.parametrize("field", ["scores", "inference_logprobs"])
def test_numbers_that_are_not_finite_float32_are_refused(api, number, field):
    fields = {"scores": "[0.5, @]", "inference_logprobs": "[[0.5], [0.5, @]]"}
    where = {"scores": [1], "inference_logprobs": [1, 1]}
    body = json.dumps({**group(), field: "#"}).replace('"#"', fields[field].replace("@", number))
    answer = api.started().post("/scored_data", content=body, headers={"Content-Type": "application/json"})
    assert error_path(answer) == ["body", field, *where[field]]


@pytest.mark.parametrize(
    "place", [b'"images":"@"', b'"images":{"@":1}', b'"@":1', b'"messages":[[{"role":"@","content":""}]]']
)
@pytest.mark.parametrize("text", [b"\xff", b"\\ud800"])
def test_text_that_is_not_unicode_is_refused(api, place, text):
    body = json.dumps(group()).encode()[:-1] + b"," + place.replace(b"@", text) + b"}"
    answer = api.post("/scored_data", content=body)
    assert error_path(answer) == ["body"]
    assert ("UTF-8" if text == b"\xff" else "half of a surrogate pair (byte ") in answer.json()["detail"][0]["msg"]
    assert error_path(api.post("/scored_data_list", content=b"[" + body + b"]"))[0] == "body"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"tokens": [[1]]}', b"[" * 100_000])
def test_bodies_that_are_not_groups_are_refused(api, body):
    assert error_path(api.post("/scored_data", content=body))[0] == "body"


def test_deep_nesting_is_refused(api):
    deep = "[" * 60 + "]" * 60
    body = json.dumps(group(images="#")).replace('"#"', deep)
    assert error_path(api.post("/scored_data", content=body)) == ["body", "images"]


def test_invalid_run_names_are_refused(client):
    assert error_path(client.get("/runs/a b/status")) == ["path", "run"]
    assert error_path(client.get(f"/runs/{'x' * 65}/status")) == ["path", "run"]
    name = fresh_name()
    Api(client, name).register()
    assert name in client.get("/runs").json()["runs"]


def test_runs_are_separate(client):
    one, other = (Api(client, fresh_name()).started() for _ in range(2))
    one.send(1, 2)
    assert other.marks() is None
    assert one.marks() == [1, 2]


def test_openapi_document_describes_every_endpoint(client):
    document = client.get("/openapi.json").json()
    paths = document["paths"]
    for path in ("/register", "/register-env", "/scored_data", "/scored_data_list", "/disconnect-env"):
        for prefix in ("", "/runs/{run}"):
            operation = paths[prefix + path]["post"]
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            assert "$ref" in schema or schema.get("items", schema)["required"] == ["tokens", "masks", "scores"]
            assert {"200", "422", "503"} <= set(operation["responses"])
    for path in ("/batch", "/status", "/status-env", "/info", "/wandb_info", "/latest_example"):
        assert "schema" in paths[path]["get"]["responses"]["200"]["content"]["application/json"]
    references = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references <= set(document["components"]["schemas"])
    assert client.get("/docs").status_code == 200
