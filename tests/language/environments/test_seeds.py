"""Test the seeds of requests for several completions, which are split over several servers."""

from __future__ import annotations

import asyncio

import pytest

from rlframe.language.environments import APIServerConfig, ServerManager
from rlframe.language.environments.model_server import options_with_derived_seed
from rlframe.language.model.tokenizers import ByteTokenizer
from tests.language.environments.model import Model, serving
from tests.language.server.serving import DEADLINE, serving_policy

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server():
    with serving_policy() as one:
        yield one


async def chat(manager, **options):
    return [choice.message.content for choice in (await manager.chat_completion(messages=MESSAGES, **options)).choices]


async def completion(manager, **options):
    return [choice.text for choice in (await manager.completion(prompt="ab", **options)).choices]


async def tokens(manager, **options):
    return [*map(tuple, (await manager.tokens_and_logprobs_completion(input_ids=[1, 2], **options))[1])]


async def managed_chat(manager, **options):
    async with manager.managed_server(tokenizer=ByteTokenizer()) as managed:
        await managed.chat_completion(messages=MESSAGES, **options)
        return [tuple(node.tokens) for node in managed.get_state()["nodes"]]


async def managed_completion(manager, **options):
    async with manager.managed_server(tokenizer=ByteTokenizer()) as managed:
        await managed.completion(prompt="ab", **options)
        return [tuple(node.tokens) for node in managed.get_state()["nodes"]]


async def dedicated(manager, **options):
    async with manager.dedicated_server() as one:
        return await completion(one, **options)


METHODS = (chat, completion, tokens, managed_chat, managed_completion, dedicated)


def ask(configs, method, **options):
    async def run():
        manager = ServerManager(configs)
        try:
            return await asyncio.wait_for(method(manager, n=16, max_tokens=8, **options), DEADLINE)
        finally:
            await manager.close()

    return asyncio.run(run())


@pytest.mark.parametrize("server_type", ["openai", pytest.param("sglang", marks=pytest.mark.system)])
@pytest.mark.parametrize("method", METHODS)
def test_completions_with_a_seed_differ_and_are_reproducible(server, method, server_type):
    config = APIServerConfig(base_url=server.url(), model_name="policy", server_type=server_type)
    answers = ask([config], method, seed=3)
    assert len(set(answers)) == 16
    assert ask([config, config], method, seed=3) == answers  # the result is the same with two servers
    # The request is split after 8 completions. The seed of its second part must not be 3 + 8 = 11.
    assert not set(answers) & set(ask([config], method, seed=11))
    assert not set(answers) & set(ask([config], method))


@pytest.mark.parametrize("ignored", [True, False], ids=["n ignored", "n used"])
@pytest.mark.parametrize("method", METHODS)
def test_parts_of_a_request_have_different_seeds(method, ignored):
    for options in ({"seed": 3}, {"extra_body": {"seed": 3}}):
        with serving(Model(n_ignored=ignored)) as model:
            answers = ask([APIServerConfig(base_url=model.url, model_name="m")], method, **options)
        assert len(answers) == 16
        sent = [(request["seed"], request.get("n", 1)) for request in model.requests]
        # For n completions, vLLM uses n consecutive seeds, which begin with the request's seed. If n is ignored, it
        # uses one.
        streams = [seed + i for seed, n in sent for i in range(1 if ignored else n)]
        assert len(set(streams)) == len(streams) and min(sent)[0] == 3


def test_no_seed_is_added_to_requests_without_a_seed():
    assert options_with_derived_seed({"n": 4}, 8) == {"n": 4}
    assert options_with_derived_seed({"seed": None, "extra_body": {"top_k": 1}}, 8) == {
        "seed": None,
        "extra_body": {"top_k": 1},
    }
