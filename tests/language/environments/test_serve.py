"""Test environments with the real trajectory service and a fake model server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import threading
import time
import urllib.request
import uuid
import warnings

import numpy as np
import pytest

from rlframe.errors import EnvError, UnavailableError, UsageError
from rlframe.language.environments import APIServerConfig, EvalHandlingEnum, ScoredDataGroup, ScoredDataItem
from rlframe.language.environments.collecting import ATTEMPTS, FAILURES_IN_A_ROW
from rlframe.language.environments.serving import Membership
from rlframe.trajectories import Group
from tests.language.environments.model import Model, serving
from tests.language.environments.running import (
    DEADLINE,
    Letters,
    make_env,
    prompt_of,
    pull,
    serving_env,
    text_of,
    trainer,
)
from tests.trajectories.serving import running_service
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with running_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture()
def url(service):
    """Return the URL of a run that no other test uses."""
    return f"{service.url}/runs/{uuid.uuid4().hex}"


@pytest.fixture()
def model():
    with serving(Model()) as one:
        yield one


def report_of(url: str) -> dict:
    """Return the service's report."""
    with urllib.request.urlopen(f"{url}/report", timeout=DEADLINE) as answer:
        return json.load(answer)


def envs_of(url: str) -> dict[str, dict]:
    """Return a dict from the service's report: name of an environment -> its status."""
    return {env["wandb_name"]: env for env in report_of(url)["envs"]}


def test_trainer_receives_the_sampled_tokens(url, model):
    model.reply, model.policy_version = lambda prompt, number: [65 + number % 2], 7
    with trainer(url, num_steps=2) as client, serving_env(lambda: make_env(Letters, model, url=url)) as running:
        groups = [pull(client)[0] for _ in range(2)]
        running.join()
    first, second = map(prompt_of, groups)  # their order is random, because groups are collected concurrently
    assert first != second
    for group in groups:
        length = len(prompt_of(group))
        assert [row.tolist()[length:] for row in group.tokens] == [[65], [66]]
        assert [row.tolist() for row in group.masks] == [[-100] * length + [65], [-100] * length + [66]]
        expected = [[1.0] * length + [model.logprob(token)] for token in (65, 66)]
        np.testing.assert_allclose([row.tolist() for row in group.inference_logprobs], expected, rtol=1e-6)
        assert (group.scores.tolist(), group.policy_version, group.env_id) == ([0, 1], 7, 0)
    assert envs_of(url)["letters_0"]["connected"] is False


class Turns(Letters):
    """An environment with two turns in each sequence. `first_done` counts the completed first turns."""

    async def setup(self):
        await super().setup()
        self.first_done = 0

    async def collect_trajectories(self, item):
        nodes = []
        for index in range(self.config.group_size):
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                first = await managed.completion(prompt=f"{item}:{index}", max_tokens=1)
                self.first_done += 1
                await managed.completion(prompt=f"{item}:{index}{first.choices[0].text};", max_tokens=1)
                nodes += managed.get_state()["nodes"]
        tokens, masks = [node.tokens for node in nodes], [node.masked_tokens for node in nodes]
        return ScoredDataGroup(tokens=tokens, masks=masks, scores=[0.0, 1.0]), []


def test_paused_trajectories_continue_where_they_stopped(url, model):
    """The queue becomes full during the first turns. The second turns start when there is room again."""
    model.open.clear()
    other = Group([[1, 1]] * 2, [[1, 1]] * 2, [0, 1])
    make = lambda: make_env(Turns, model, url=url, max_batches_offpolicy=2)  # noqa: E731
    with trainer(url) as client, serving_env(make) as running:
        wait_until(lambda: len(model.requests) == 2, "two groups are collected concurrently")
        client.post([other, other])
        wait_until(lambda: running.env.status_dict["queue_size"] == 2, "the environment sees that the queue is full")
        gate = next(iter(running.env.workers)).gate
        wait_until(lambda: gate.closed, "collecting pauses")
        model.open.set()
        wait_until(lambda: running.env.first_done == 2, "the first turns are answered")
        polls = running.env.statistics.mainloop_timings
        seen = len(polls)
        wait_until(lambda: len(polls) >= seen + 3, "the environment continues to poll the service")
        assert len(model.requests) == 2 and client.status().queue_size == 2
        while not gate.closed or client.status().queue_size:
            if gate.closed:
                pull(client)
            else:
                break
        groups = [pull(client)[0] for _ in range(2)]
        while any(group.tokens[0].tolist() == [1, 1] for group in groups):
            groups = [*groups[1:], pull(client)[0]]
    prompts = [text_of(request["prompt"]) for request in model.requests]
    for name in ("item 1:0", "item 1:1", "item 2:0", "item 2:1"):
        assert prompts.count(name) == 1, "no turn is sampled twice"
    for group in groups:
        for row in group.tokens:
            first, between, second = text_of(row).partition(";")
            assert between and first[-1].isalpha() and len(second) == 1


def test_version_of_a_group_is_the_oldest_version_of_its_turns(url, model):
    model.policy_version = 3
    versions = iter([5, 4, 9, 9])
    answer = model.answer

    def changing(path, body):
        model.policy_version = next(versions, 9)
        return answer(path, body)

    model.answer = changing
    make = lambda: make_env(Turns, model, url=url, max_num_workers=1)  # noqa: E731
    with trainer(url, num_steps=2) as client, serving_env(make):
        assert [pull(client)[0].policy_version for _ in range(2)] == [4, 9]


def test_collecting_stays_within_max_batches_offpolicy(url, model, monkeypatch):
    """The environment reads each status late. Groups that it sent in the meantime must count as queued."""
    ask = Membership.status

    async def slowly(self):
        status = await ask(self)
        await asyncio.sleep(0.1)
        return status

    def reply(prompt, number):  # only the first group is complete before the status request
        time.sleep(0 if number < 2 else 0.05)
        return [65]

    monkeypatch.setattr(Membership, "status", slowly)
    model.reply = reply
    make = lambda: make_env(Letters, model, url=url, max_num_workers=8, max_batches_offpolicy=3)  # noqa: E731
    with trainer(url) as client, serving_env(make) as running:
        wait_until(lambda: client.status().queue_size == 3, "the queue fills")
        polls = running.env.statistics.mainloop_timings
        seen = len(polls)
        wait_until(lambda: len(polls) >= seen + 3, "the environment continues to poll the service")
        assert client.status().queue_size == 3 and len(model.requests) == 3


class WithEvaluation(Letters):
    """An environment whose evaluation waits for a signal from the test, and then sends requests to the model."""

    async def setup(self):
        await super().setup()
        self.evaluated, self.finish_evaluation = [], threading.Event()

    async def evaluate(self, *args, **kwargs):
        self.evaluated.append(self.curr_step)
        while not self.finish_evaluation.is_set():
            await asyncio.sleep(0.01)
        answers = await self.gather_eval(self.server.completion(prompt="exam", split="eval") for _ in range(3))
        self.evaluated.append([answer.choices[0].text for answer in answers])


@pytest.mark.parametrize("handling", list(EvalHandlingEnum), ids=lambda handling: handling.name)
def test_evaluation_pauses_or_limits_collecting(url, model, handling):
    options = {"steps_per_eval": 2, "eval_handling": handling, "eval_limit_ratio": 0.5, "max_num_workers": 2}
    make = lambda: make_env(WithEvaluation, model, url=url, max_batches_offpolicy=500, **options)  # noqa: E731
    with trainer(url) as client, serving_env(make) as running:
        for _ in range(2):
            pull(client)
        env = running.env
        wait_until(lambda: env.evaluated, "the evaluation starts")
        assert env.evaluated == [2]
        model.open.clear()
        if handling is EvalHandlingEnum.STOP_TRAIN:
            model.open.set()
            wait_until(lambda: not env.workers, "pending requests are answered")
        at_once = {"STOP_TRAIN": 0, "LIMIT_TRAIN": 1, "NONE": 2}[handling.name]
        wait_until(lambda: len(env.workers) == at_once, "the expected number of workers continues")
        sent, polls = len(model.requests), env.statistics.mainloop_timings
        seen = len(polls)
        wait_until(lambda: len(polls) >= seen + 3, "the environment continues to poll the service")
        assert len(env.workers) == at_once and len(model.requests) - sent <= at_once
        model.open.set()
        env.finish_evaluation.set()
        wait_until(lambda: len(env.evaluated) == 2, "the evaluation ends")
        before = env.number
        wait_until(lambda: env.number > before + 2, "collecting continues")
    assert len(env.evaluated[1]) == 3 and all(env.evaluated[1])
    assert len([request for request in model.requests if request["prompt"] == "exam"]) == 3


def test_failed_evaluation_closes_coroutines_that_have_not_started(model):
    async def task(number):
        await asyncio.sleep(0)
        assert number, "the first fails"

    async def run():
        env = make_env(Letters, model, max_eval_workers=1)
        try:
            await env.gather_eval(map(task, range(9)))
        finally:
            await env.close()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(AssertionError, match="the first fails"):
            asyncio.run(run())
        gc.collect()
    assert not [one for one in warned if "never awaited" in str(one.message)]


class Counting(Letters):
    def save_checkpoint(self, step, data=None):
        super().save_checkpoint(step, {**(data or {}), "number": self.number})


def test_restarted_environment_loads_the_checkpoint(url, model, tmp_path):
    options = {"resume_file": str(tmp_path / "resume.json")}
    checkpoints = {"checkpoint_dir": str(tmp_path), "save_checkpoint_interval": 2}
    folder = tmp_path / "env_checkpoints" / "letters_0"
    with trainer(url, **checkpoints) as client:
        with serving_env(lambda: make_env(Counting, model, url=url, **options)) as running:
            for _ in range(3):
                pull(client)
            wait_until((folder / "step-2.json").exists, "the checkpoint is written")
            wait_until(lambda: running.env.curr_step == 3, "the environment reaches step 3")
            running.stop()
        saved = json.loads((folder / "step-2.json").read_text())["number"]
        assert saved >= 2 and [path.name for path in folder.iterdir()] == ["step-2.json"]
        with serving_env(lambda: make_env(Counting, model, url=url, **options)) as running:
            wait_until(lambda: len(envs_of(url)) and running.env.wandb_prepend, "the environment has registered again")
            assert running.env.wandb_prepend == "letters_0" and list(envs_of(url)) == ["letters_0"]
            wait_until(
                lambda: getattr(running.env, "number", 0) > saved, "the environment continues after the checkpoint"
            )


@pytest.mark.system
def test_killed_and_restarted_service_loses_no_group(tmp_path, model):
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(running_service(tmp_path))
        client = stack.enter_context(trainer(service.url, num_steps=6))
        make = lambda: make_env(Letters, model, url=service.url, max_batches_offpolicy=8)  # noqa: E731
        running = stack.enter_context(serving_env(make))
        first = [pull(client)[0] for _ in range(2)]
        wait_until(lambda: client.status().queue_size >= 3, "groups wait")
        service.restart()
        groups = [*first, *(pull(client)[0] for _ in range(4))]
        running.join()
    prompts = list(map(prompt_of, groups))
    assert len(set(prompts)) == 6
    assert {group.env_id for group in groups} == {0}


def test_environment_registers_again_after_a_reset(url, model):
    with trainer(url) as client, serving_env(lambda: make_env(Letters, model, url=url)) as running:
        pull(client)
        client.register(batch_size=4, max_token_len=64, num_steps=10)
        client.batch()  # environments can register only after this request
        assert sum(map(len, pull(client))) == 4
        wait_until(lambda: running.env.config.batch_size == 4, "the environment has the new batch size")
        assert envs_of(url)["letters_0"]["connected"]


class Failing(Letters):
    async def collect_trajectories(self, item):
        self.tried = [*getattr(self, "tried", []), item]
        if self.tried.count(item) < self.fails_before:
            raise RuntimeError(f"no luck with {item}")
        return await super().collect_trajectories(item)

    fails_before = ATTEMPTS


def test_failed_item_is_retried(url, model):
    make = lambda: make_env(Failing, model, url=url, max_num_workers=1)  # noqa: E731
    with trainer(url, num_steps=1) as client, serving_env(make) as running:
        (group,) = pull(client)
    assert prompt_of(group) == "item 1"
    assert running.env.tried[:ATTEMPTS] == ["item 1"] * ATTEMPTS


def test_cleanup_is_called_after_each_attempt(url, model):
    class Tidy(Failing):
        cleaned = 0

        async def cleanup(self):
            self.cleaned += 1

    with trainer(url) as client, serving_env(lambda: make_env(Tidy, model, url=url, max_num_workers=1)) as running:
        pull(client)
        running.stop()
    env = running.env
    assert env.tried[:ATTEMPTS] == ["item 1"] * ATTEMPTS and env.cleaned == len(env.tried)


def test_inference_weights_divide_the_model_servers_slots(url, model):
    class Others(Letters):
        name = "others"

    slots = lambda running: running.env.server.servers[0].sem.total_tokens  # noqa: E731
    with contextlib.ExitStack() as stack:
        stack.enter_context(trainer(url))
        three, one, all_ = (
            stack.enter_context(
                serving_env(lambda weight=weight: make_env(Others, model, url=url, inference_weight=weight))
            )
            for weight in (3.0, 1.0, -1.0)
        )
        wait_until(
            lambda: (slots(three), slots(one)) == (384, 128),
            "the environments get three quarters and one quarter of the 512 slots",
        )
        wait_until(lambda: all_.env.status_dict, "the third environment has received a status")
        assert slots(all_) == 512


def test_number_of_workers_depends_on_the_model_servers(model):
    config = Letters.env_config_cls(max_num_workers_per_node=3, use_wandb=False)
    server = APIServerConfig(base_url=model.url)
    for servers, at_once in ((1, 3), (2, 6)):
        assert Letters(config, [server] * servers).max_num_workers == at_once
    assert make_env(Letters, model, max_num_workers=5).max_num_workers == 5


def test_max_eval_workers_limits_concurrent_tasks(model):
    at_once = []

    async def run():
        env, under_way = make_env(Letters, model, max_eval_workers=3), 0

        async def task(number):
            nonlocal under_way
            under_way += 1
            at_once.append(under_way)
            await asyncio.sleep(0)
            under_way -= 1
            return number

        try:
            return await env.gather_eval(map(task, range(9)))
        finally:
            await env.close()

    assert asyncio.run(run()) == list(range(9)) and max(at_once) == 3


class Table:
    """A fake tracker whose tables are plain lists of rows."""

    def table(self, columns, rows):
        return rows

    def close(self):
        pass


@pytest.mark.parametrize(("per_group", "texts"), [(1, ["c", "e"]), (-1, ["c", "d", "e", "f"])])
def test_table_of_rollouts_contains_only_the_newest_groups(model, per_group, texts):
    options = {"num_rollouts_to_keep": 2, "num_rollouts_per_group_for_logging": per_group}

    async def run():
        env = make_env(Letters, model, **options)
        env.tracker = Table()
        for pair in ("ab", "cd", "ef"):
            group = ScoredDataGroup(tokens=[[ord(letter)] for letter in pair], masks=[[1], [1]], scores=[0.0, 1.0])
            await env.add_rollouts_for_wandb(group)
        table = (await env.create_rollout_table({}))["train/rollouts"]
        await env.close()
        return table

    assert [text for text, _ in asyncio.run(run())] == texts


@pytest.mark.system
def test_environment_ends_after_many_failures_in_a_row(url, model):
    class Hopeless(Failing):
        fails_before = 10**9

    expected_error = pytest.raises(EnvError, match=r"failed \d+ times in a row.*no luck with item")
    with (
        trainer(url),
        serving_env(lambda: make_env(Hopeless, model, url=url, max_num_workers=16)) as running,
        expected_error as error,
    ):
        running.join()
    times = int(re.findall(r"failed (\d+) times", str(error.value))[0])
    # Attempts run concurrently, so a few more of the 16 can fail before the error is raised.
    assert FAILURES_IN_A_ROW <= times < FAILURES_IN_A_ROW + 16
    assert envs_of(url)["letters_0"]["connected"] is False


@pytest.mark.system
def test_group_with_mismatched_rows_is_an_error(url, model):
    class Ragged(Letters):
        async def collect_trajectories(self, item):
            return ScoredDataGroup(tokens=[[1], [2]], masks=[[1], [2, 3]], scores=[0.0, 1.0]), []

    expected_error = pytest.raises(EnvError, match="Sequence 1 has 1 tokens, but 2 masks")
    with (
        trainer(url),
        serving_env(lambda: make_env(Ragged, model, url=url, max_num_workers=16)) as running,
        expected_error,
    ):
        running.join()


@pytest.mark.system
def test_worker_timeout_cancels_slow_items(url, model):
    class Slow(Letters):
        async def collect_trajectories(self, item):
            if item == "item 1":
                await asyncio.sleep(DEADLINE)
            return await super().collect_trajectories(item)

    make = lambda: make_env(Slow, model, url=url, max_num_workers=1, worker_timeout=3.0)  # noqa: E731
    with trainer(url) as client, serving_env(make):
        (group,) = pull(client)
    assert prompt_of(group) != "item 1"


def test_unusable_groups_are_not_sent(url, model):
    class WithUnusableGroups(Letters):
        async def collect_trajectories(self, item):
            group, _ = await super().collect_trajectories(item)
            if item == "item 1":
                group["scores"] = [1.0, 1.0]
            if item == "item 2":
                group = {name: rows[:1] for name, rows in group.items()}
            if item == "item 3":
                group["tokens"] = group["masks"] = [[1] * 65] * 2
                group["inference_logprobs"] = None
            return None if item == "item 4" else group, []

    with trainer(url) as client, serving_env(lambda: make_env(WithUnusableGroups, model, url=url, max_num_workers=1)):
        assert prompt_of(pull(client)[0]) == "item 5"


class Singles(Letters):
    """An environment with `collect_trajectory`. Its first item adds the item "further" to the backlog."""

    async def collect_trajectory(self, item):
        answer = await self.server.completion(prompt=item, max_tokens=1)
        token = ord(answer.choices[0].text)
        sequence = ScoredDataItem(
            tokens=[1, token], masks=[-100, token], scores=float(token % 7), overrides={"n": token}, advantages=None
        )
        return sequence, ["further"] if item == "item 1" else []

    collect_trajectories = Letters.__mro__[1].collect_trajectories


def test_single_trajectories_become_a_group(url, model):
    make = lambda: make_env(Singles, model, url=url, max_num_workers=1, include_messages=True)  # noqa: E731
    with trainer(url) as client, serving_env(make) as running:
        groups = [pull(client)[0] for _ in range(2)]
        wait_until(lambda: any(request["prompt"] == "further" for request in model.requests), "the backlog is used")
        assert isinstance(running.env.backlog, list)
    assert sorted(row.tolist()[1] for row in groups[0].tokens) == [65, 66]
    assert groups[0].advantages is None
    assert sorted(override["n"] for override in groups[0].overrides) == [65, 66]
    assert groups[0].messages[0][0]["role"] == "user"


def test_stale_groups_are_replaced_by_new_groups(url, model):
    """The service refuses a group that is too old. The environment drops it, and collects another group."""
    model.policy_version = 1
    make = lambda: make_env(Letters, model, url=url, max_num_workers=1)  # noqa: E731
    with trainer(url, max_staleness=1) as client:
        client.set_policy_version(1)
        model.open.clear()
        with serving_env(make):
            wait_until(lambda: model.requests, "a group is being collected")
            client.set_policy_version(9)
            answer = model.answer
            model.answer = lambda path, body: (setattr(model, "policy_version", 9), answer(path, body))[1]
            model.open.set()
            (group,) = pull(client)
    assert (prompt_of(group), group.policy_version) == ("item 2", 9)


def test_refused_group_is_sent_again_until_accepted(url, model):
    """The environment sends the group again, for longer than `service_timeout`, until the trainer takes a batch."""
    model.policy_version = 1
    other = Group([[1, 1]] * 2, [[1, 1]] * 2, [0, 1])
    make = lambda: make_env(Letters, model, url=url, max_num_workers=1, service_timeout=3.0)  # noqa: E731
    with trainer(url, max_staleness=0, num_steps=2) as client:
        client.set_policy_version(1)
        model.open.clear()
        with serving_env(make) as running:
            wait_until(lambda: model.requests, "a group is being collected")
            client.post(other)  # in the batch after this group, the environment's group would be too old
            model.open.set()
            wait_until(lambda: report_of(url)["refused"] >= 4, "the group is refused for longer than service_timeout")
            pull(client)
            (group,) = pull(client)
            assert prompt_of(group) == "item 1"
            running.join()


def test_several_groups_of_one_item_are_sent(url, model):
    class Pairs(Letters):
        async def collect_trajectories(self, item):
            group, _ = await super().collect_trajectories(item)
            return [group, None], []

        async def postprocess_histories(self, trajectories):
            assert trajectories[1] is None
            first = trajectories[0]
            return [first, {**first, "scores": [5.0, 6.0]}]

    with trainer(url) as client, serving_env(lambda: make_env(Pairs, model, url=url, max_num_workers=1)):
        groups = [pull(client)[0] for _ in range(2)]
    assert [group.scores.tolist() for group in groups] == [[0, 1], [5, 6]]


@pytest.mark.system
def test_missing_trainer_or_too_small_batch_ends_the_environment(url, model):
    expected_error = pytest.raises(UnavailableError, match="'letters' waited 0.3 s to register")
    with (
        trainer(url, requests_batch=False),
        serving_env(lambda: make_env(Letters, model, url=url, service_timeout=0.3)) as env,
        expected_error,
    ):
        env.join()
    expected_error = pytest.raises(UsageError, match="group_size=4 sequences does not fit into a batch of 2")
    with trainer(url), serving_env(lambda: make_env(Letters, model, url=url, group_size=4)) as env, expected_error:
        env.join()


@pytest.mark.system
def test_environment_with_a_minimum_collects_despite_a_full_queue(url, model):
    other = Group([[1, 1]] * 2, [[1, 1]] * 2, [0, 1])
    make = lambda: make_env(Letters, model, url=url, max_batches_offpolicy=2, min_batch_allocation=0.5)  # noqa: E731
    with trainer(url, batch_size=4) as client:
        client.post([other] * 8)
        with serving_env(make) as running:
            wait_until(
                lambda: running.env.status_dict.get("self_queue_size") == 2,
                "the queue contains the environment's minimum",
            )
            polls = running.env.statistics.mainloop_timings
            seen = len(polls)
            wait_until(lambda: len(polls) >= seen + 3, "the environment continues to poll the service")
            assert running.env.status_dict["self_queue_size"] == 2 and len(model.requests) == 2


@pytest.mark.system
def test_each_batch_contains_the_minimum_of_an_environment(url, model):
    class Others(Letters):
        name = "others"

    both = {"max_batches_offpolicy": 2, "url": url}
    first = lambda: make_env(Letters, model, min_batch_allocation=0.5, **both)  # noqa: E731
    second = lambda: make_env(Others, model, **both)  # noqa: E731
    with trainer(url, batch_size=4) as client, serving_env(first) as one:
        wait_until(lambda: one.env.status_dict.get("unallocated_fraction") == 0.5, "the environment has its minimum")
        with serving_env(second):
            batches = [pull(client) for _ in range(4)]
        assert one.env.derived_batch_size == 4
    for groups in batches[2:]:
        assert sum(len(group) for group in groups if group.env_id == one.env.env_id) >= 2
