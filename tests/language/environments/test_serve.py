"""Environments at the real trajectory service, with a model over HTTP."""

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
    asked,
    made,
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
    """Of a run of the test's own."""
    return f"{service.url}/runs/{uuid.uuid4().hex}"


@pytest.fixture()
def model():
    with serving(Model()) as one:
        yield one


def report_of(url: str) -> dict:
    """What the service knows."""
    with urllib.request.urlopen(f"{url}/report", timeout=DEADLINE) as answer:
        return json.load(answer)


def envs_of(url: str) -> dict[str, dict]:
    """What the service says about environments, by name."""
    return {env["wandb_name"]: env for env in report_of(url)["envs"]}


def test_groups_arrive_as_they_were_sampled(url, model):
    model.reply, model.policy_version = lambda prompt, number: [65 + number % 2], 7
    with trainer(url, num_steps=2) as client, serving_env(lambda: made(Letters, model, url=url)) as running:
        groups = [pull(client)[0] for _ in range(2)]
        running.join()
    first, second = map(asked, groups)  # several are collected at once, and the quicker ones are there first
    assert first != second
    for group in groups:
        length = len(asked(group))
        assert [row.tolist()[length:] for row in group.tokens] == [[65], [66]]
        assert [row.tolist() for row in group.masks] == [[-100] * length + [65], [-100] * length + [66]]
        expected = [[1.0] * length + [model.logprob(token)] for token in (65, 66)]
        np.testing.assert_allclose([row.tolist() for row in group.inference_logprobs], expected, rtol=1e-6)
        assert (group.scores.tolist(), group.policy_version, group.env_id) == ([0, 1], 7, 0)
    assert envs_of(url)["letters_0"]["connected"] is False


class Turns(Letters):
    """Two turns, with an item between them that a test can look at."""

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


def test_a_pause_keeps_what_is_there(url, model):
    """The queue fills while trajectories are between their turns: they go on where they were."""
    model.open.clear()
    other = Group([[1, 1]] * 2, [[1, 1]] * 2, [0, 1])
    make = lambda: made(Turns, model, url=url, max_batches_offpolicy=2)  # noqa: E731
    with trainer(url) as client, serving_env(make) as running:
        wait_until(lambda: len(model.requests) == 2, "two groups are collected at once")
        client.post([other, other])
        wait_until(lambda: running.env.status_dict["queue_size"] == 2, "the environment sees that the queue is full")
        gate = next(iter(running.env.workers)).gate
        wait_until(lambda: gate.closed, "it pauses")
        model.open.set()
        wait_until(lambda: running.env.first_done == 2, "what was asked is answered")
        looks = running.env.statistics.mainloop_timings
        seen = len(looks)
        wait_until(lambda: len(looks) >= seen + 3, "it goes on looking at the service")
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


def test_a_sent_group_knows_the_oldest_version_of_its_turns(url, model):
    model.policy_version = 3
    versions = iter([5, 4, 9, 9])
    answer = model.answer

    def changing(path, body):
        model.policy_version = next(versions, 9)
        return answer(path, body)

    model.answer = changing
    make = lambda: made(Turns, model, url=url, max_num_workers=1)  # noqa: E731
    with trainer(url, num_steps=2) as client, serving_env(make):
        assert [pull(client)[0].policy_version for _ in range(2)] == [4, 9]


def test_collecting_stays_within_max_batches_offpolicy(url, model, monkeypatch):
    """Though groups arrive after the service has answered, and before the environment hears of it."""
    ask = Membership.status

    async def slowly(self):
        status = await ask(self)
        await asyncio.sleep(0.1)
        return status

    def reply(prompt, number):  # the first group is there before the status is asked for, the others after it
        time.sleep(0 if number < 2 else 0.05)
        return [65]

    monkeypatch.setattr(Membership, "status", slowly)
    model.reply = reply
    make = lambda: made(Letters, model, url=url, max_num_workers=8, max_batches_offpolicy=3)  # noqa: E731
    with trainer(url) as client, serving_env(make) as running:
        wait_until(lambda: client.status().queue_size == 3, "the queue fills")
        looks = running.env.statistics.mainloop_timings
        seen = len(looks)
        wait_until(lambda: len(looks) >= seen + 3, "it goes on looking at the service")
        assert client.status().queue_size == 3 and len(model.requests) == 3


class Examined(Letters):
    """An evaluation that asks the model, as training does."""

    async def setup(self):
        await super().setup()
        self.evaluated, self.go_on = [], threading.Event()

    async def evaluate(self, *args, **kwargs):
        self.evaluated.append(self.curr_step)
        while not self.go_on.is_set():
            await asyncio.sleep(0.01)
        answers = await self.gather_eval(self.server.completion(prompt="exam", split="eval") for _ in range(3))
        self.evaluated.append([answer.choices[0].text for answer in answers])


@pytest.mark.parametrize("handling", list(EvalHandlingEnum), ids=lambda handling: handling.name)
def test_an_evaluation_pauses_or_limits_collecting(url, model, handling):
    options = {"steps_per_eval": 2, "eval_handling": handling, "eval_limit_ratio": 0.5, "max_num_workers": 2}
    make = lambda: made(Examined, model, url=url, max_batches_offpolicy=500, **options)  # noqa: E731
    with trainer(url) as client, serving_env(make) as running:
        for _ in range(2):
            pull(client)
        env = running.env
        wait_until(lambda: env.evaluated, "the evaluation starts")
        assert env.evaluated == [2]
        model.open.clear()
        if handling is EvalHandlingEnum.STOP_TRAIN:
            model.open.set()
            wait_until(lambda: not env.workers, "what is asked is answered")
        at_once = {"STOP_TRAIN": 0, "LIMIT_TRAIN": 1, "NONE": 2}[handling.name]
        wait_until(lambda: len(env.workers) == at_once, "so many go on")
        asked, looks = len(model.requests), env.statistics.mainloop_timings
        seen = len(looks)
        wait_until(lambda: len(looks) >= seen + 3, "it goes on looking at the service")
        assert len(env.workers) == at_once and len(model.requests) - asked <= at_once
        model.open.set()
        env.go_on.set()
        wait_until(lambda: len(env.evaluated) == 2, "the evaluation ends")
        before = env.number
        wait_until(lambda: env.number > before + 2, "collecting goes on")
    assert len(env.evaluated[1]) == 3 and all(env.evaluated[1])
    assert len([request for request in model.requests if request["prompt"] == "exam"]) == 3


def test_an_evaluation_that_fails_leaves_no_task_unawaited(model):
    async def task(number):
        await asyncio.sleep(0)
        assert number, "the first fails"

    async def run():
        env = made(Letters, model, max_eval_workers=1)
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


def test_checkpoints_are_saved_at_the_interval_and_loaded_by_the_next(url, model, tmp_path):
    options = {"resume_file": str(tmp_path / "resume.json")}
    told = {"checkpoint_dir": str(tmp_path), "save_checkpoint_interval": 2}
    folder = tmp_path / "env_checkpoints" / "letters_0"
    with trainer(url, **told) as client:
        with serving_env(lambda: made(Counting, model, url=url, **options)) as running:
            for _ in range(3):
                pull(client)
            wait_until((folder / "step-2.json").exists, "the checkpoint is written")
            wait_until(lambda: running.env.curr_step == 3, "it is at step 3")
            running.stop()
        saved = json.loads((folder / "step-2.json").read_text())["number"]
        assert saved >= 2 and [path.name for path in folder.iterdir()] == ["step-2.json"]
        with serving_env(lambda: made(Counting, model, url=url, **options)) as running:
            wait_until(lambda: len(envs_of(url)) and running.env.wandb_prepend, "it is back")
            assert running.env.wandb_prepend == "letters_0" and list(envs_of(url)) == ["letters_0"]
            wait_until(lambda: getattr(running.env, "number", 0) > saved, "it goes on behind the checkpoint")


def test_a_service_that_is_killed_and_started_again_loses_nothing(tmp_path, model):
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(running_service(tmp_path))
        client = stack.enter_context(trainer(service.url, num_steps=6))
        make = lambda: made(Letters, model, url=service.url, max_batches_offpolicy=8)  # noqa: E731
        running = stack.enter_context(serving_env(make))
        first = [pull(client)[0] for _ in range(2)]
        wait_until(lambda: client.status().queue_size >= 3, "groups wait")
        service.restart()
        groups = [*first, *(pull(client)[0] for _ in range(4))]
        running.join()
    prompts = list(map(asked, groups))
    assert len(set(prompts)) == 6
    assert {group.env_id for group in groups} == {0}


def test_a_run_that_starts_afresh_is_joined_again(url, model):
    with trainer(url) as client, serving_env(lambda: made(Letters, model, url=url)) as running:
        pull(client)
        client.register(batch_size=4, max_token_len=64, num_steps=10)
        client.batch()  # before which nobody can join; groups that were on their way may make one
        assert sum(map(len, pull(client))) == 4
        wait_until(lambda: running.env.config.batch_size == 4, "it knows the new batch size")
        assert envs_of(url)["letters_0"]["connected"]


class Failing(Letters):
    async def collect_trajectories(self, item):
        self.tried = [*getattr(self, "tried", []), item]
        if self.tried.count(item) < self.fails_before:
            raise RuntimeError(f"no luck with {item}")
        return await super().collect_trajectories(item)

    fails_before = ATTEMPTS


def test_an_item_that_fails_is_tried_again(url, model):
    make = lambda: made(Failing, model, url=url, max_num_workers=1)  # noqa: E731
    with trainer(url, num_steps=1) as client, serving_env(make) as running:
        (group,) = pull(client)
    assert asked(group) == "item 1"
    assert running.env.tried[:ATTEMPTS] == ["item 1"] * ATTEMPTS


def test_cleanup_follows_each_item_also_one_that_failed(url, model):
    class Tidy(Failing):
        cleaned = 0

        async def cleanup(self):
            self.cleaned += 1

    with trainer(url) as client, serving_env(lambda: made(Tidy, model, url=url, max_num_workers=1)) as running:
        pull(client)
        running.stop()
    env = running.env
    assert env.tried[:ATTEMPTS] == ["item 1"] * ATTEMPTS and env.cleaned == len(env.tried)


def test_environments_share_the_model_servers_by_weight_but_for_one_that_takes_all(url, model):
    class Others(Letters):
        name = "others"

    slots = lambda running: running.env.server.servers[0].sem.total_tokens  # noqa: E731
    with contextlib.ExitStack() as stack:
        stack.enter_context(trainer(url))
        three, one, all_ = (
            stack.enter_context(
                serving_env(lambda weight=weight: made(Others, model, url=url, inference_weight=weight))
            )
            for weight in (3.0, 1.0, -1.0)
        )
        wait_until(lambda: (slots(three), slots(one)) == (384, 128), "they have three and one of four parts")
        wait_until(lambda: all_.env.status_dict, "the third has looked")
        assert slots(all_) == 512


def test_so_many_groups_are_collected_at_once_per_model_server(model):
    config = Letters.env_config_cls(max_num_workers_per_node=3, use_wandb=False)
    server = APIServerConfig(base_url=model.url)
    for servers, at_once in ((1, 3), (2, 6)):
        assert Letters(config, [server] * servers).max_num_workers == at_once
    assert made(Letters, model, max_num_workers=5).max_num_workers == 5


def test_so_many_tasks_of_an_evaluation_run_at_once(model):
    at_once = []

    async def run():
        env, under_way = made(Letters, model, max_eval_workers=3), 0

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
    """Where rollouts go, in place of Weights & Biases."""

    def table(self, columns, rows):
        return rows

    def close(self):
        pass


@pytest.mark.parametrize(("per_group", "texts"), [(1, ["c", "e"]), (-1, ["c", "d", "e", "f"])])
def test_the_table_of_rollouts_has_the_newest_groups(model, per_group, texts):
    options = {"num_rollouts_to_keep": 2, "num_rollouts_per_group_for_logging": per_group}

    async def run():
        env = made(Letters, model, **options)
        env.tracker = Table()
        for pair in ("ab", "cd", "ef"):
            group = ScoredDataGroup(tokens=[[ord(letter)] for letter in pair], masks=[[1], [1]], scores=[0.0, 1.0])
            await env.add_rollouts_for_wandb(group)
        table = (await env.create_rollout_table({}))["train/rollouts"]
        await env.close()
        return table

    assert [text for text, _ in asyncio.run(run())] == texts


def test_an_environment_that_always_fails_ends(url, model):
    class Hopeless(Failing):
        fails_before = 10**9

    told = pytest.raises(EnvError, match=r"failed \d+ times in a row.*no luck with item")
    with (
        trainer(url),
        serving_env(lambda: made(Hopeless, model, url=url, max_num_workers=16)) as running,
        told as error,
    ):
        running.join()
    times = int(re.findall(r"failed (\d+) times", str(error.value))[0])
    assert FAILURES_IN_A_ROW <= times < FAILURES_IN_A_ROW + 16  # others fail before the last one is seen
    assert envs_of(url)["letters_0"]["connected"] is False


def test_a_group_whose_rows_do_not_fit_is_an_error(url, model):
    class Ragged(Letters):
        async def collect_trajectories(self, item):
            return ScoredDataGroup(tokens=[[1], [2]], masks=[[1], [2, 3]], scores=[0.0, 1.0]), []

    told = pytest.raises(EnvError, match="Sequence 1 has 1 tokens, but 2 masks")
    with trainer(url), serving_env(lambda: made(Ragged, model, url=url, max_num_workers=16)) as running, told:
        running.join()


def test_an_item_that_takes_too_long_is_given_up(url, model):
    class Slow(Letters):
        async def collect_trajectories(self, item):
            if item == "item 1":
                await asyncio.sleep(DEADLINE)
            return await super().collect_trajectories(item)

    make = lambda: made(Slow, model, url=url, max_num_workers=1, worker_timeout=3.0)  # noqa: E731
    with trainer(url) as client, serving_env(make):
        (group,) = pull(client)
    assert asked(group) != "item 1"


def test_groups_that_teach_nothing_are_not_sent(url, model):
    class Odd(Letters):
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

    with trainer(url) as client, serving_env(lambda: made(Odd, model, url=url, max_num_workers=1)):
        assert asked(pull(client)[0]) == "item 5"


class Singles(Letters):
    """One trajectory at a time, the first of which has more to do."""

    async def collect_trajectory(self, item):
        answer = await self.server.completion(prompt=item, max_tokens=1)
        token = ord(answer.choices[0].text)
        sequence = ScoredDataItem(
            tokens=[1, token], masks=[-100, token], scores=float(token % 7), overrides={"n": token}, advantages=None
        )
        return sequence, ["further"] if item == "item 1" else []

    collect_trajectories = Letters.__mro__[1].collect_trajectories


def test_trajectories_are_put_together_and_items_may_have_followers(url, model):
    make = lambda: made(Singles, model, url=url, max_num_workers=1, include_messages=True)  # noqa: E731
    with trainer(url) as client, serving_env(make) as running:
        groups = [pull(client)[0] for _ in range(2)]
        wait_until(lambda: any(request["prompt"] == "further" for request in model.requests), "the backlog goes first")
        assert isinstance(running.env.backlog, list)
    assert sorted(row.tolist()[1] for row in groups[0].tokens) == [65, 66]
    assert groups[0].advantages is None
    assert sorted(override["n"] for override in groups[0].overrides) == [65, 66]
    assert groups[0].messages[0][0]["role"] == "user"


def test_groups_that_the_trainer_has_left_behind_are_collected_anew(url, model):
    """What is too old when it comes ends neither the environment nor its worker: a fresh one is sent."""
    model.policy_version = 1
    make = lambda: made(Letters, model, url=url, max_num_workers=1)  # noqa: E731
    with trainer(url, max_staleness=1) as client:
        client.set_policy_version(1)
        model.open.clear()
        with serving_env(make):
            wait_until(lambda: model.requests, "a group is under way")
            client.set_policy_version(9)
            answer = model.answer
            model.answer = lambda path, body: (setattr(model, "policy_version", 9), answer(path, body))[1]
            model.open.set()
            (group,) = pull(client)
    assert (asked(group), group.policy_version) == ("item 2", 9)


def test_what_the_service_cannot_take_now_waits(url, model):
    """However long: it is there once the trainer takes what is before it."""
    model.policy_version = 1
    other = Group([[1, 1]] * 2, [[1, 1]] * 2, [0, 1])
    make = lambda: made(Letters, model, url=url, max_num_workers=1, service_timeout=3.0)  # noqa: E731
    with trainer(url, max_staleness=0, num_steps=2) as client:
        client.set_policy_version(1)
        model.open.clear()
        with serving_env(make) as running:
            wait_until(lambda: model.requests, "a group is under way")
            client.post(other)  # a batch that comes before it: by its turn it would be too old
            model.open.set()
            wait_until(lambda: report_of(url)["refused"] >= 4, "it is refused again and again, beyond service_timeout")
            pull(client)
            (group,) = pull(client)
            assert asked(group) == "item 1"
            running.join()


def test_several_groups_of_one_item_are_sent_together(url, model):
    class Pairs(Letters):
        async def collect_trajectories(self, item):
            group, _ = await super().collect_trajectories(item)
            return [group, None], []

        async def postprocess_histories(self, trajectories):
            assert trajectories[1] is None
            first = trajectories[0]
            return [first, {**first, "scores": [5.0, 6.0]}]

    with trainer(url) as client, serving_env(lambda: made(Pairs, model, url=url, max_num_workers=1)):
        groups = [pull(client)[0] for _ in range(2)]
    assert [group.scores.tolist() for group in groups] == [[0, 1], [5, 6]]


@pytest.mark.system
def test_without_a_trainer_or_with_too_small_a_batch_it_ends(url, model):
    told = pytest.raises(UnavailableError, match="'letters' waited 0.3 s to register")
    with trainer(url, once=False), serving_env(lambda: made(Letters, model, url=url, service_timeout=0.3)) as env, told:
        env.join()
    told = pytest.raises(UsageError, match="group_size=4 sequences fits into no batch of 2")
    with trainer(url), serving_env(lambda: made(Letters, model, url=url, group_size=4)) as env, told:
        env.join()


@pytest.mark.system
def test_what_others_sent_does_not_stop_one_with_a_minimum(url, model):
    other = Group([[1, 1]] * 2, [[1, 1]] * 2, [0, 1])
    make = lambda: made(Letters, model, url=url, max_batches_offpolicy=2, min_batch_allocation=0.5)  # noqa: E731
    with trainer(url, batch_size=4) as client:
        client.post([other] * 8)
        with serving_env(make) as running:
            wait_until(
                lambda: running.env.status_dict.get("self_queue_size") == 2, "its own part of the batches is filled"
            )
            looks = running.env.statistics.mainloop_timings
            seen = len(looks)
            wait_until(lambda: len(looks) >= seen + 3, "it goes on looking at the service")
            assert running.env.status_dict["self_queue_size"] == 2 and len(model.requests) == 2


@pytest.mark.system
def test_two_environments_share_and_a_minimum_is_kept(url, model):
    class Others(Letters):
        name = "others"

    both = {"max_batches_offpolicy": 2, "url": url}
    first = lambda: made(Letters, model, min_batch_allocation=0.5, **both)  # noqa: E731
    second = lambda: made(Others, model, **both)  # noqa: E731
    with trainer(url, batch_size=4) as client, serving_env(first) as one:
        wait_until(lambda: one.env.status_dict.get("unallocated_fraction") == 0.5, "it knows what is its own")
        with serving_env(second):
            batches = [pull(client) for _ in range(4)]
        assert one.env.derived_batch_size == 4
    for groups in batches[2:]:
        assert sum(len(group) for group in groups if group.env_id == one.env.env_id) >= 2
