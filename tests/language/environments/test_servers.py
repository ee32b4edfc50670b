"""Test the clients of model servers over HTTP: answers, retries, split requests and recorded tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import types

import openai
import pytest

from rlframe.errors import PeerError, UsageError
from rlframe.language.environments import (
    APIServerConfig,
    ReasoningConfig,
    ServerBaseline,
    ServerManager,
    model_server,
    tokenize_for_trainer,
)
from rlframe.language.environments.collecting import CollectAttempt, Gate, current_attempt
from rlframe.language.environments.files import to_json
from rlframe.language.environments.groups import to_trajectory_group
from rlframe.language.environments.server_manager import resolve_servers
from rlframe.language.model.tokenizers import load_tokenizer
from tests.language.environments.model import Model, serving
from tests.ports import free_port

DEADLINE = 60


@pytest.fixture()
def model():
    with serving(Model()) as one:
        yield one


def config_of(model: Model, **options) -> APIServerConfig:
    return APIServerConfig(base_url=model.url, model_name="m", timeout=DEADLINE, **options)


def ask(configs, use, **options):
    """Make a `ServerManager`, run the coroutine `use(manager)`, and return its result."""

    async def run():
        manager = ServerManager(configs, **options)
        try:
            return await asyncio.wait_for(use(manager), DEADLINE)
        finally:
            await manager.close()

    return asyncio.run(run())


@pytest.mark.parametrize("ids", [True, False], ids=["token_ids", "token names"])
def test_sampled_tokens_are_returned(model, ids):
    model.ids = ids
    model.reply = lambda prompt, number: [200 + number, 7]

    async def use(manager):
        return await manager.tokens_and_logprobs_completion(input_ids=[1, 2], n=2, max_tokens=4)

    prompt, tokens, logprobs, reasons = ask([config_of(model)], use)
    assert (prompt, tokens, reasons) == ([1, 2], [[200, 7], [201, 7]], ["stop", "stop"])
    assert logprobs == [[model.logprob(200), model.logprob(7)], [model.logprob(201), model.logprob(7)]]
    assert model.requests[0]["prompt"] == [1, 2] and model.requests[0]["return_token_ids"] is True


@pytest.mark.parametrize("chats", [False, True], ids=["tokens", "chat"])
@pytest.mark.parametrize("versions", [{"policy_versions": [7, 9]}, {"policy_version": 7}], ids=str)
def test_version_of_an_answer_is_its_oldest_token_version(model, versions, chats):
    answer = model.answer
    model.policy_version = 9

    def with_versions(path, body):
        status, content = answer(path, body)
        content["choices"][1].update(versions)
        return status, content

    model.answer = with_versions
    attempt = CollectAttempt("item", Gate())

    async def use(manager):
        current_attempt.set(attempt)
        if chats:
            await manager.chat_completion(messages=[{"role": "user", "content": "hi"}], n=2)
        else:
            await manager.tokens_and_logprobs_completion(input_ids=[1], n=2)

    ask([config_of(model)], use)
    assert attempt.policy_version == 7


def test_requests_to_an_sglang_server_have_the_sglang_format(model):
    async def use(manager):
        return await manager.tokens_and_logprobs_completion(input_ids=[1], n=2, max_tokens=4, temperature=0.5)

    prompt, tokens, logprobs, reasons = ask([config_of(model, server_type="sglang")], use)
    assert (prompt, tokens, reasons) == ([1], [[65], [66]], ["stop", "stop"])
    assert logprobs == [[model.logprob(65)], [model.logprob(66)]]
    assert model.requests == [
        {
            "path": "/generate",
            "input_ids": [1],
            "sampling_params": {"n": 2, "max_new_tokens": 4, "temperature": 0.5},
            "return_logprob": True,
        }
    ]


def test_server_without_token_ids_is_refused(model):
    model.ids = False
    answer = model.answer

    def without(path, body):
        status, content = answer(path, body)
        for choice in content["choices"]:
            choice["logprobs"] = None
        return status, content

    model.answer = without
    with pytest.raises(UsageError, match="without token ids.*serve policy.*vLLM"):
        ask([config_of(model)], lambda manager: manager.tokens_and_logprobs_completion(input_ids=[1]))


def test_large_requests_are_split_and_choices_renumbered(model):
    answer = ask(
        [config_of(model)],
        lambda manager: manager.chat_completion(messages=[{"role": "user", "content": "?"}], n=7),
        max_n_completions=3,
    )
    assert sorted(request.get("n", 1) for request in model.requests) == [1, 3, 3]
    assert sorted(int(choice.message.content) for choice in answer.choices) == list(range(7))
    assert [choice.index for choice in answer.choices] == list(range(7))


@pytest.mark.parametrize("configured", [True, False])
def test_requests_are_repeated_if_the_server_ignores_n(model, configured):
    model.n_ignored = True

    async def use(manager):
        return [await manager.completion(prompt="x", n=3) for _ in range(2)]

    for answer in ask([config_of(model, n_kwarg_is_ignored=configured)], use):
        assert len(answer.choices) == 3
    several = [request for request in model.requests if request.get("n", 1) > 1]
    assert (len(model.requests), len(several)) == (6, 0 if configured else 1)


def test_requests_succeed_after_the_server_starts(caplog):
    caplog.set_level("INFO", "rlframe.language")
    port = free_port()
    with contextlib.ExitStack() as stack:
        model = Model()
        model.url = f"http://127.0.0.1:{port}/v1"
        tried = threading.Event()

        def start():
            tried.wait(DEADLINE)
            stack.enter_context(serving(model, port))

        starter = threading.Thread(target=start)
        starter.start()

        async def use(manager):
            asking = asyncio.create_task(manager.completion(prompt="x"))
            while manager.servers[0].server_healthy:
                await asyncio.sleep(0.01)
            tried.set()
            answer = await asking
            return answer, manager.servers[0].server_healthy, list(manager.servers[0].attempts_list)

        answer, healthy, attempts = ask([config_of(model)], use)
        starter.join()
        assert answer.choices[0].text == "A" and healthy and attempts[0] >= 2
        messages = [record.getMessage() for record in caplog.records if "model server" in record.getMessage()]
        assert ["does not answer yet" in messages[0], messages[1]] == [True, f"The model server {model.url} answers."]
        assert len(messages) == 2  # one message when the server fails, one when it answers again


def test_failed_requests_are_retried_until_the_timeout(model):
    model.failures = 10**9
    config = config_of(model).model_copy(update={"timeout": 1, "health_check": False})
    with pytest.raises(PeerError, match=r"did not answer within 1 s and \d+ attempts.*(not now|timed out)"):
        ask([config], lambda manager: manager.completion(prompt="x"))


@pytest.mark.parametrize("blocked_by", ["pause", "others"])
def test_timeout_excludes_pauses_and_waiting_for_a_slot(model, monkeypatch, blocked_by):
    """A failed request is retried even if it first waited for longer than `timeout`."""
    late, clock = [0.0], time.monotonic
    monkeypatch.setattr(model_server, "time", types.SimpleNamespace(monotonic=lambda: clock() + late[0]))
    model.failures = 1
    attempt = CollectAttempt("item", Gate())

    async def use(manager):
        slots = manager.servers[0].sem
        current_attempt.set(attempt)
        attempt.gate.set(closed=blocked_by == "pause")
        async with slots if blocked_by == "others" else contextlib.nullcontext():
            asking = asyncio.create_task(manager.completion(prompt="x"))
            while not (slots.statistics().tasks_waiting or attempt.gate._opened._waiters):
                await asyncio.sleep(0)
            late[0] = 10.0 * DEADLINE
        attempt.gate.set(closed=False)
        return await asking

    assert ask([config_of(model, num_max_requests_at_once=1)], use).choices[0].text == "A"
    assert len(model.requests) == 2


def test_refused_requests_are_not_retried(model):
    answer = model.answer
    model.answer = lambda path, body: (answer(path, body), (400, {"error": {"message": "too long"}}))[1]
    with pytest.raises(openai.BadRequestError, match="too long"):
        ask([config_of(model)], lambda manager: manager.completion(prompt="x"))
    assert len(model.requests) == 1


def test_failed_server_is_avoided(model, monkeypatch):
    monkeypatch.setattr(model_server, "_AVOIDED", DEADLINE)
    dead = f"http://127.0.0.1:{free_port()}/v1"

    async def use(manager):
        manager.servers[0].server_healthy, manager.servers[0]._failed_at = False, time.monotonic()
        return [await manager.completion(prompt="x") for _ in range(3)]

    assert len(ask([config_of(model).model_copy(update={"base_url": dead}), config_of(model)], use)) == 3


def test_reasoning_options_depend_on_the_provider(model):
    reasoning = ReasoningConfig(effort="low")
    chat = [{"role": "user", "content": "?"}]

    async def use(manager):
        await manager.chat_completion(messages=chat)
        await manager.chat_completion(messages=chat, skip_reasoning=True)

    ask([config_of(model)], use, reasoning_config=reasoning)
    assert [request.get("reasoning") for request in model.requests] == [{"enabled": True, "effort": "low"}, None]
    assert reasoning.extra_body(None) == {"reasoning_effort": "low"}
    assert ReasoningConfig().extra_body("http://x") == {}
    assert ReasoningConfig(max_tokens=2048).extra_body("http://x") == {
        "reasoning": {"enabled": True, "max_tokens": 2048}
    }


def test_weight_limits_concurrent_requests():
    async def run():
        server, most = model_server.APIServer(APIServerConfig(base_url="http://x/v1", num_max_requests_at_once=4)), 0
        slots = server.sem

        async def enter():
            nonlocal most
            async with slots:
                most = max(most, slots.borrowed_tokens)
                await asyncio.sleep(0)

        await asyncio.gather(*(enter() for _ in range(20)))
        full, most = most, 0
        await server.update_weight(0.5)
        given_up = asyncio.create_task(enter())
        tasks = [asyncio.create_task(enter()) for _ in range(20)]
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(*tasks)
        await server.update_weight(0.0)
        least = slots.total_tokens
        await server.close()
        return full, most, slots.borrowed_tokens, least

    assert asyncio.run(asyncio.wait_for(run(), DEADLINE)) == (4, 2, 0, 1)


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut off"])
def test_next_turn_contains_the_sampled_tokens_unchanged(model, ended):
    tokenizer = load_tokenizer("byte")
    chat = [{"role": "user", "content": "hi"}]
    end = tokenizer.apply_chat_template(chat)[-1]  # the template ends a message with this token
    # Decoding these tokens and encoding the text again would give different tokens.
    first = [0xFF, *b"ok ", *([end] if ended else [])]
    model.reply = lambda prompt, number: first if number == 0 else [*b"bye"]

    async def use(manager):
        async with manager.managed_server(tokenizer=tokenizer) as managed:
            answer = await managed.chat_completion(messages=chat, n=1, max_tokens=5)
            reply = {"role": "assistant", "content": answer.choices[0].message.content.strip()}
            await managed.chat_completion(messages=[*chat, reply, {"role": "user", "content": "so?"}], max_tokens=5)
            return managed.get_state()["nodes"]

    (node,) = ask([config_of(model)], use)
    start = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert model.requests[0]["prompt"] == start
    two = [{"role": "user", "content": "hi"}, {"role": "user", "content": "so?"}]
    second = tokenizer.apply_chat_template(two, add_generation_prompt=True)
    added = second[len(tokenizer.apply_chat_template(chat)) :]
    if not ended:
        added = [end, *added]
    assert model.requests[1]["prompt"] == [*start, *first, *added]
    assert node.tokens == [*start, *first, *added, *b"bye"]
    masks = [-100] * len(start) + first + [-100] * len(added) + list(b"bye")
    assert node.masked_tokens == masks
    assert node.logprobs == [1.0 if mask == -100 else model.logprob(mask) for mask in masks]


def test_message_of_an_answer_can_be_sent_in_the_next_request(model):
    tokenizer = load_tokenizer("byte")

    async def use(manager):
        messages = [{"role": "user", "content": "hi"}]
        async with manager.managed_server(tokenizer=tokenizer) as managed:
            for _ in range(2):
                answer = await managed.chat_completion(messages=messages, max_tokens=5)
                messages += [answer.choices[0].message, {"role": "user", "content": "so?"}]
            (node,) = managed.get_state()["nodes"]
        plain = await manager.chat_completion(messages=messages)
        return node, [*messages, plain.choices[0].message]

    node, chat = ask([config_of(model)], use)
    assert [message["content"] for message in node.messages] == ["hi", "A", "so?", "B"]
    assert [mask for mask in node.masked_tokens if mask != -100] == [65, 66]
    assert [message["content"] for message in model.requests[-1]["messages"]] == ["hi", "A", "so?", "B", "so?"]
    group = {"tokens": [[1]], "masks": [[1]], "scores": [1.0], "messages": [chat]}
    sent = to_trajectory_group(group, env_id=0, policy_version=0)
    assert sent.messages[0][1] == {"role": "assistant", "content": "A"}
    assert json.loads(to_json(group))["messages"][0][1]["content"] == "A"


def test_tool_calls_are_refused_by_name(model):
    calls = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": calls}]

    async def use(manager):
        async with manager.managed_server(tokenizer=load_tokenizer("byte")) as managed:
            await managed.chat_completion(messages=messages)

    with pytest.raises(UsageError, match=r"messages\[1\].tool_calls is not supported by the byte tokenizer"):
        ask([config_of(model)], use)


def test_unrelated_chat_becomes_a_new_sequence(model):
    tokenizer = load_tokenizer("byte")
    other = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "else"}]

    async def use(manager):
        async with manager.managed_server(tokenizer=tokenizer) as managed:
            await managed.chat_completion(messages=other[:1], n=2, max_tokens=5)
            await managed.chat_completion(messages=[*other, other[0]], max_tokens=5)
            reply = {"role": "assistant", "content": "B"}
            await managed.chat_completion(messages=[other[0], reply, other[0]], max_tokens=5)
            return managed.get_state()["nodes"]

    nodes = ask([config_of(model)], use)
    assert [node.tokens[-1] for node in nodes] == [65, 68, 67]  # the last chat continues the second sequence
    assert nodes[1].tokens[: len(model.requests[0]["prompt"]) + 1] == [*model.requests[0]["prompt"], 66]
    assert model.requests[1]["prompt"] == tokenizer.apply_chat_template([*other, other[0]], add_generation_prompt=True)


def test_nodes_have_the_same_order_as_the_choices(model):
    async def use(manager):
        async with manager.managed_server(tokenizer=load_tokenizer("byte")) as managed:
            answer = await managed.completion(prompt="ab", n=3, max_tokens=1)
            nodes = managed.get_state()["nodes"]
            managed.reset()
            return answer, nodes, managed.get_state()["nodes"]

    answer, nodes, left = ask([config_of(model)], use)
    assert [choice.text for choice in answer.choices] == ["A", "B", "C"]
    assert [node.tokens[-1] for node in nodes] == [65, 66, 67]
    assert [node.full_text for node in nodes] == ["abA", "abB", "abC"]
    assert nodes[0].metadata == {"finish_reason": "stop"} and left == []


def test_managed_server_refuses_tools(model):
    async def use(manager):
        async with manager.managed_server(tokenizer=load_tokenizer("byte")) as managed:
            await managed.chat_completion(messages=[], tools=[{}])

    with pytest.raises(UsageError, match="does not support tools"):
        ask([config_of(model)], use)


@pytest.mark.parametrize("is_managed", [False, True])
def test_list_of_prompts_is_refused(model, is_managed):
    async def use(manager):
        if not is_managed:
            return await manager.completion(prompt=["x", "y"], n=2)
        async with manager.managed_server(tokenizer=load_tokenizer("byte")) as managed:
            await managed.completion(prompt=["x", "y"], n=2)

    with pytest.raises(UsageError, match="completion takes one prompt, got a list of 2. Call it once for each prompt"):
        ask([config_of(model)], use)
    assert not model.requests


def test_last_turn_or_all_assistant_turns_are_trained_on(model):
    tokenizer = load_tokenizer("byte")
    chat = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "four"},
    ]
    last = tokenize_for_trainer(tokenizer, chat)
    every = tokenize_for_trainer(tokenizer, chat, train_on_all_assistant_turns=True, include_messages=True)
    assert last["tokens"] == every["tokens"] == list(tokenizer.apply_chat_template(chat))
    assert every["messages"] == chat and "messages" not in last

    def trained(masks):
        return tokenizer.decode([token for token in masks if token != -100], skip_special_tokens=True)

    assert "four" in trained(last["masks"]) and "two" not in trained(last["masks"])
    assert "four" in trained(every["masks"]) and "two" in trained(every["masks"])
    assert "3" not in trained(every["masks"])


def test_servers_are_local_or_on_slurm_nodes(tmp_path, monkeypatch):
    urls = [config.base_url for config in resolve_servers(ServerBaseline(), slurm=False)]
    assert urls == [f"http://localhost:{port}/v1" for port in (9004, 9005, 9006, 9007)]
    one = APIServerConfig(base_url="http://x/v1", model_name="m")
    assert resolve_servers(one, slurm=False) == [one]
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert resolve_servers([one], slurm=True) == [one]
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nprintf 'n1\\nn2\\n'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("INFER_TP", "4")
    found = resolve_servers([one], slurm=True)
    assert [config.base_url for config in found] == ["http://n2:9000/v1", "http://n2:9001/v1"]
    assert {config.model_name for config in found} == {"m"}
    for name, value in (("INFER_TP", "0"), ("INFER_TP", "9"), *(("NUM_TRAINING_NODES", wrong) for wrong in ("2", "x"))):
        with monkeypatch.context() as patched, pytest.raises(UsageError, match=f"has 2 nodes, .*{name}={value}"):
            patched.setenv(name, value)
            resolve_servers([one], slurm=True)


def test_invalid_server_configs_are_refused():
    with pytest.raises(UsageError, match="made-up answers.*not supported"):
        ServerManager([APIServerConfig(base_url="http://x/v1")], testing=True)
    with pytest.raises(UsageError, match="needs a base_url"):
        ServerManager([APIServerConfig()])
    with pytest.raises(UsageError, match="list of server configs is empty"):
        ServerManager([])
    with pytest.raises(ValueError, match="no option 'base_ulr'. Did you mean 'base_url'"):
        APIServerConfig(base_ulr="x")
