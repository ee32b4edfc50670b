"""Tests of the policy server: learners start and stop, clients disconnect, and too many requests arrive."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import json
import threading

import httpx
import openai
import pytest

from rlframe.errors import PeerError, UnavailableError, UsageError
from rlframe.language import EngineConfig
from rlframe.language.model.tokenizers import ByteTokenizer
from rlframe.language.server import PolicyServer, PolicyServerConfig
from tests.extras import needs
from tests.language.server.serving import (
    DEADLINE,
    ENGINE,
    LONG,
    TINY,
    Learner,
    client_of,
    params_of,
    serving_policy,
)
from tests.ports import free_address
from tests.waiting import wait_until

LONG_ENGINE = EngineConfig(slots=2, steps=2, max_waiting=2)
BODY = {"ignore_eos": True, "return_token_ids": True}


def root_of(server):
    return server.url().removesuffix("/v1")


def policy(server):
    return httpx.get(f"{server.url()}/policy", timeout=DEADLINE).json()


def ask(client, **options):
    return client.completions.create(
        **{"model": "policy", "prompt": [1, 2], "max_tokens": 8, "extra_body": BODY, **options}
    )


def long_stream(client):
    """Return a response stream that has started and takes several seconds."""
    stream = ask(client, max_tokens=30_000, stream=True)
    next(stream)
    return stream


def test_concurrent_requests_are_decoded_together():
    with serving_policy(engine=dataclasses.replace(ENGINE, slots=8)) as server, client_of(server) as client:
        ask(client, max_tokens=200)  # compiles
        alone = server.stats()["calls"]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda seed: ask(client, max_tokens=200, seed=seed), range(8)))
        assert len({tuple(answer.choices[0].token_ids) for answer in answers}) == 8
        assert server.stats()["calls"] - alone < 6 * alone, "the requests were decoded one after another"


@pytest.mark.system
def test_running_answers_continue_with_new_parameters():
    learner = Learner(version=3)
    with serving_policy(learner, LONG_ENGINE, LONG) as server, client_of(server) as client:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            whole = pool.submit(ask, client, max_tokens=2000)
            stream = ask(client, max_tokens=2000, stream=True)
            first = next(stream)
            wait_until(lambda: server.stats()["running"] == 2, "the two requests are not decoded together")
            calls = server.stats()["calls"]
            wait_until(lambda: server.stats()["calls"] > calls + 1, "nothing is decoded")
            learner.publish(7)
            events = [first, *stream]
            answer = whole.result(DEADLINE)
        versions = [event.policy_version for event in events]
        assert versions[0] == 3 and versions[-1] == 7 and versions == sorted(versions)
        assert sum(len(event.choices[0].token_ids) for event in events) == 2000
        (choice,) = answer.choices
        assert answer.policy_version == 7 and set(choice.policy_versions) == {3, 7}
        assert len(choice.policy_versions) == len(choice.token_ids) == 2000
        assert not hasattr(ask(client).choices[0], "policy_versions")
        report = policy(server)
        assert (report["version"], report["learner_version"], report["versions_behind"]) == (7, 7, 0)
        assert report["refreshes"] == 2 and report["since_learner"] < DEADLINE and report["problem"] is None


@pytest.mark.system
def test_each_choice_of_a_response_has_its_own_policy_version():
    learner = Learner(version=3)
    one_by_one = dataclasses.replace(LONG_ENGINE, slots=1)
    with (
        serving_policy(learner, one_by_one, LONG) as server,
        client_of(server) as client,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        future = pool.submit(ask, client, n=2, max_tokens=1000)
        wait_until(lambda: server.stats()["tokens"] > 1000, "the first choice is not complete")
        learner.publish(7)
        answer = future.result(DEADLINE)
    assert answer.policy_version == 7
    assert [choice.policy_version for choice in answer.choices] == [3, 7]


def test_answers_after_a_refresh_use_the_new_parameters():
    learner = Learner(version=1)
    with serving_policy(learner) as server, client_of(server) as client:
        before = ask(client, temperature=0).choices[0].token_ids
        learner.publish(2)
        wait_until(lambda: policy(server)["version"] == 2, "no refresh")
        after = ask(client, temperature=0)
        assert after.policy_version == 2 and after.choices[0].token_ids != before
    with serving_policy(Learner(version=2)) as server, client_of(server) as client:
        assert ask(client, temperature=0).choices[0].token_ids == after.choices[0].token_ids


def test_learner_version_0_replaces_the_initial_parameters():
    learner = Learner(version=0)
    learner.published = 0, params_of(9)
    with serving_policy(learner) as server, client_of(server) as client:
        expected = ask(client, temperature=0).choices[0].token_ids
    with serving_policy(learner, params=params_of(0)) as server, client_of(server) as client:
        wait_until(lambda: policy(server)["learner_version"] == 0, "the server did not read the learner's parameters")
        answer = ask(client, temperature=0)
        assert (answer.policy_version, answer.choices[0].token_ids) == (0, expected)


def test_restarted_learner_is_ignored_until_its_version_is_newer(caplog):
    learner = Learner(version=5)
    with serving_policy(learner) as server, client_of(server) as client:
        learner.publish(1)
        wait_until(lambda: "The learner restarted" in caplog.text, "no warning")
        assert ask(client).policy_version == 5
        learner.publish(6)
        wait_until(lambda: policy(server)["version"] == 6, "no refresh")
    assert caplog.text.count("The learner restarted") == 1


@pytest.mark.system
def test_server_answers_after_its_learner_died_and_uses_the_next_learner():
    needs("launchpad")
    from tests import serving

    address = free_address()
    learner = Learner(version=4)
    server_of_learner = contextlib.ExitStack()
    server_of_learner.enter_context(serving.serving(learner, address))
    handle = serving.client(address)
    with server_of_learner, serving_policy(handle, learner_deadline=5.0) as server, client_of(server) as client:
        assert ask(client).policy_version == 4
        server_of_learner.close()
        problem = wait_until(lambda: policy(server)["problem"], "the server did not notice that the learner died")
        assert f"The learner at {address} did not answer get_params() within 5 s" in problem
        assert ask(client).policy_version == 4 and policy(server)["since_learner"] > 0.5
        learner.publish(9)
        server_of_learner.enter_context(serving.serving(learner, address))
        wait_until(lambda: policy(server)["version"] == 9, "the server did not use the next learner")
        assert ask(client).policy_version == 9 and policy(server)["problem"] is None


def make_server_without_learner(learner_deadline):
    """Return (server, address), where no learner runs at the address."""
    needs("launchpad")
    from tests import serving

    address = free_address()
    config = PolicyServerConfig(port=0, learner_deadline=learner_deadline, engine=ENGINE)
    return PolicyServer(config, TINY, "byte", serving.client(address)), address


def test_requests_get_status_503_until_the_server_has_parameters():
    server, _ = make_server_without_learner(learner_deadline=2 * DEADLINE)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with (
            client_of(server) as client,
            pytest.raises(openai.InternalServerError, match="no parameters yet") as caught,
        ):
            ask(client)
        assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"] == "1"
        assert httpx.get(f"{root_of(server)}/health", timeout=DEADLINE).status_code == 503
    finally:
        server.stop()
        thread.join(DEADLINE)
    assert not thread.is_alive()


def test_server_raises_if_its_learner_does_not_answer():
    server, address = make_server_without_learner(learner_deadline=1.0)
    with pytest.raises(PeerError, match=f"The learner at {address} did not answer"):
        server.run()


@pytest.mark.system
@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
def test_disconnected_client_frees_its_slot(streams, caplog):
    with serving_policy(engine=LONG_ENGINE, model_config=LONG) as server, client_of(server) as client:
        if streams:
            long_stream(client).close()
        else:
            with pytest.raises(openai.APITimeoutError):
                ask(client, max_tokens=30_000, n=2, timeout=2.0)
        wait_until(lambda: server.stats()["running"] == 0, "the request still uses its slot")
        assert 0 < server.stats()["tokens"] < 29_000
        assert ask(client).choices[0].finish_reason == "length"
    gc.collect()
    assert caplog.text == ""  # nothing was logged, for example no warning from asyncio


def test_server_with_a_full_queue_refuses_only_new_requests():
    with serving_policy(engine=LONG_ENGINE, model_config=LONG) as server, client_of(server) as client:
        streams = [long_stream(client) for _ in range(2)]
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, client, n=2)
            wait_until(lambda: server.stats()["waiting"] == 2, "nothing waits")
            with pytest.raises(openai.RateLimitError, match="2 requests wait for the decode engine") as caught:
                ask(client)
            assert caught.value.response.headers["retry-after"] == "1"
            for stream in streams:
                assert next(stream).choices[0].token_ids
                stream.close()
            assert len(waiting.result(DEADLINE).choices) == 2


@pytest.mark.system
@pytest.mark.parametrize("streams", [True, pytest.param(False, marks=pytest.mark.system)], ids=["stream", "whole"])
def test_request_fails_after_the_request_timeout(streams):
    with serving_policy(engine=LONG_ENGINE, model_config=LONG, request_timeout=2.0) as server:
        with client_of(server) as client, pytest.raises(openai.APIError, match="not complete within 2 s"):
            list(ask(client, max_tokens=30_000, stream=streams))
        wait_until(lambda: server.stats()["running"] == 0, "the request still uses its slot")


def test_encoding_a_long_text_does_not_block_other_requests():
    encoding, released = threading.Event(), threading.Event()

    class Slow(ByteTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            encoding.set()
            assert released.wait(DEADLINE)
            return super().encode(text, add_special_tokens=add_special_tokens)

    with (
        serving_policy(tokenizer=Slow()) as server,
        client_of(server) as client,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        future = pool.submit(ask, client, prompt="x" * (1 << 20))
        try:
            assert encoding.wait(DEADLINE)
            assert ask(client).choices
        finally:
            released.set()
        with pytest.raises(openai.BadRequestError, match="The prompt has 1048576 tokens"):
            future.result(DEADLINE)


def test_server_with_a_token_refuses_a_wrong_token(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    with serving_policy(token_file=str(tmp_path / "token")) as server:
        with client_of(server, api_key="secret") as client:
            assert ask(client).choices
        with client_of(server, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError, match="Authorization: Bearer TOKEN") as caught:
                ask(client)
            assert caught.value.body["type"] == "authentication_error"


def test_too_large_or_invalid_request_bodies_are_refused():
    with serving_policy(max_body_mb=1) as server:
        with client_of(server) as client, pytest.raises(openai.APIStatusError, match="at most 1 MB") as caught:
            ask(client, prompt="x" * (1 << 20))
        assert caught.value.status_code == 413
        answer = httpx.post(f"{server.url()}/completions", content=b"{", timeout=DEADLINE)
        assert answer.status_code == 400 and "not valid JSON" in answer.json()["error"]["message"]


def test_unpaired_surrogate_in_a_request_becomes_a_question_mark():
    with serving_policy() as server:

        def post(path, **body):
            content = json.dumps({"model": "policy", **body})
            answer = httpx.post(f"{server.url()}/{path}", content=content, timeout=DEADLINE)
            return answer.status_code, answer.json()

        for prompt in ("a\ud83d", ["a\ud83d"]):
            code, answer = post("completions", prompt=prompt, echo=True, return_token_ids=True)
            (choice,) = answer["choices"]
            assert (code, choice["text"][:2], choice["prompt_token_ids"]) == (200, "a?", [97, ord("?")])
        code, answer = post("chat/completions", messages=[{"role": "\ud83d", "content": "a"}])
        assert code == 400 and "got '?'" in answer["error"]["message"]


def test_prometheus_metrics_count_tokens_and_requests():
    with serving_policy(Learner(version=3)) as server, client_of(server) as client:
        ask(client, n=2)
        wait_until(lambda: server.stats()["running"] == 0)  # the slot is freed after the response
        lines = httpx.get(f"{root_of(server)}/metrics", timeout=DEADLINE).text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        read = {name: float(values[f"rlframe_policy_{name}"]) for name in ("tokens_total", "version", "running")}
        assert read == {"tokens_total": 16, "version": 3, "running": 0}
        labels = 'endpoint="/v1/completions",method="POST",status="200"'
        assert float(values[f"rlframe_policy_request_duration_seconds_count{{{labels}}}"]) == 1


def test_server_raises_if_its_learner_has_another_model():
    learner = Learner()
    other = dataclasses.replace(TINY, hidden_size=32)
    server = PolicyServer(PolicyServerConfig(port=0, engine=ENGINE), other, "byte", learner)
    with pytest.raises(UsageError, match="do not fit the policy server's model"):
        server.run()


def test_invalid_server_options_are_refused():
    small = dataclasses.replace(TINY, vocab_size=100)
    with pytest.raises(UsageError, match="The tokenizer has 263 tokens, but the model has only 100"):
        PolicyServer(PolicyServerConfig(), small, "byte", None, params_of(0))
    with pytest.raises(UsageError, match="needs a learner or parameters"):
        PolicyServer(PolicyServerConfig(), TINY, "byte")
    with pytest.raises(UsageError, match="max_body_mb must be at least 1"):
        PolicyServerConfig(max_body_mb=0)


@pytest.mark.system
def test_server_uses_newer_parameters_of_a_killed_and_resumed_learner(tmp_path):
    needs("launchpad")
    from tests import serving
    from tests.language.server.learning import BusyLearner

    address = free_address()
    child = serving.Child(address, BusyLearner, str(tmp_path))
    answers, ended = [], threading.Event()

    def ask_repeatedly(client):
        while not ended.is_set():
            answers.append(ask(client, max_tokens=64).policy_version)

    try:
        with (
            serving_policy(serving.client(address), learner_deadline=120.0) as server,
            client_of(server) as client,
            concurrent.futures.ThreadPoolExecutor(1) as pool,
        ):
            asking = pool.submit(ask_repeatedly, client)
            try:
                wait_until(lambda: policy(server)["version"] > 8, "no versions come")
                assert server._refresher._learner._memory is not None
                child.kill()
                child.close()
                last, count = policy(server)["version"], len(answers)
                wait_until(lambda: len(answers) > count + 3, "the answers stopped when the learner died")
                assert policy(server)["since_learner"] > 0.01
                child = serving.Child(address, BusyLearner, str(tmp_path))
                wait_until(lambda: answers[-1] > last, "the server did not use the resumed learner")
            finally:
                ended.set()
            asking.result(DEADLINE)
        assert answers == sorted(answers)
    finally:
        child.close()


def test_engine_failure_ends_the_server():
    def broken(*_):
        raise RuntimeError("out of memory")

    def ask_failing_engine():
        with serving_policy() as server, client_of(server) as client:
            server.live_engine()._slots.fill = broken
            with pytest.raises(openai.InternalServerError, match="out of memory") as caught:
                ask(client, n=3)
            assert caught.value.status_code == 503
            assert httpx.get(f"{root_of(server)}/health", timeout=DEADLINE).status_code == 503
            wait_until(server._stop.is_set, "the server did not stop")

    with pytest.raises(UnavailableError, match="The decode engine failed: RuntimeError: out of memory"):
        ask_failing_engine()
