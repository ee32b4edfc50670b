"""Test the examples in `examples/llm` with a fake model, which gives correct or wrong answers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import re
import sys

import pytest

from rlframe.language.environments import APIServerConfig
from rlframe.language.model.tokenizers import load_tokenizer
from tests.language.environments.model import Model, serving
from tests.trajectories.serving import ROOT

TOKENIZER = load_tokenizer("byte")
END = [TOKENIZER.eos_token_id]


def load_example(name: str):
    spec = importlib.util.spec_from_file_location(f"examples_llm_{name}", ROOT / f"examples/llm/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture()
def model():
    with serving(Model()) as one:
        yield one


def with_env(cls, model: Model, use, **options):
    """Make and set up an environment. Run the coroutine `use(env)`, and return its result."""
    config, _ = cls.config_init()
    config = type(config)(**{**config.model_dump(), "group_size": 4, **options})

    async def run():
        env = cls(config, [APIServerConfig(base_url=model.url, model_name="m", timeout=60)])
        try:
            await env.setup()
            return await use(env)
        finally:
            await env.close()

    return asyncio.run(asyncio.wait_for(run(), 60))


def text_of(prompt: list[int]) -> str:
    return TOKENIZER.decode(prompt, skip_special_tokens=True)


def encoded(text: str) -> list[int]:
    return [*TOKENIZER.encode(text, add_special_tokens=False), *END]


def test_reverse_example_scores_answers_and_evaluates(model):
    Reverse = load_example("reverse").Reverse
    held_out = load_example("reverse").held_out

    async def use(env):
        items = [await env.get_next_item() for _ in range(200)]
        model.reply = lambda prompt, number: encoded(text_of(prompt)[-2::-1] if number % 2 else "zz")
        group, _ = await env.collect_trajectories("abcd")
        model.reply = lambda prompt, number: encoded(text_of(prompt)[-2::-1])
        await env.evaluate()
        return items, env.exam, group, env.metrics

    items, exam, group, metrics = with_env(Reverse, model, use)
    assert not set(items) & set(exam) and all(map(held_out, exam)) and not any(map(held_out, items))
    assert {len(word) for word in items} == {1, 2, 3, 4, 5, 6}
    assert all(word.isalpha() and word.islower() for word in items)
    assert sorted(group["scores"]) == [0, 0, 1, 1]
    right = group["scores"].index(1)
    prompt = TOKENIZER.encode("abcd>")
    assert group["tokens"][right] == [*prompt, *encoded("dcba")]
    assert group["masks"][right] == [-100] * len(prompt) + encoded("dcba")
    assert metrics == {"train/exact_match": 0.5, "eval/exact_match": 1.0}


def test_reverse_scores_partly_correct_answers():
    Reverse = load_example("reverse").Reverse
    assert [Reverse.score("abc", text) for text in ("cba", "cb", "cbx", "cbaa", "")] == [
        *(1.0, pytest.approx(1 / 3), pytest.approx(1 / 3), pytest.approx(3 / 8), 0.0)
    ]


def test_add_example_scores_answers_and_evaluates(model):
    def answer(prompt, number):
        left, _, right = text_of(prompt).rstrip("=").partition("+")
        return encoded(str(int(left) + int(right)))

    async def use(env):
        model.reply = answer
        item = await env.get_next_item()
        group, _ = await env.collect_trajectories(item)
        await env.evaluate()
        return group, env.metrics

    group, metrics = with_env(load_example("add").Add, model, use)
    assert group["scores"] == [1.0] * 4 and metrics == {"train/exact_match": 1.0, "eval/exact_match": 1.0}


def test_reason_why_groups_are_not_sent_is_logged_once(model, caplog):
    caplog.set_level("INFO", "rlframe.language")

    async def use(env):
        model.reply = lambda prompt, number: encoded(load_example("add").Add.answer((2, 3)))
        group, _ = await env.collect_trajectories((2, 3))
        return [await env.handle_send_to_api(group) for _ in range(3)]

    assert with_env(load_example("add").Add, model, use) == [False] * 3
    (message,) = [record.getMessage() for record in caplog.records if "not sent" in record.getMessage()]
    assert "all its scores are 1." in message


def halving(prompt, number):
    """Return a guess: the middle of the numbers that are still possible after the turns in the prompt."""
    range_, _, turns = text_of(prompt).partition(":")
    low, high, guess = 1, int(range_.partition("-")[2]), ""
    for letter in turns:
        if letter == "<":
            high, guess = int(guess) - 1, ""
        elif letter == ">":
            low, guess = int(guess) + 1, ""
        else:
            guess += letter
    return encoded(str((low + high) // 2))


def test_guess_example_scores_games_and_evaluates(model):
    async def use(env):
        model.reply = halving
        node, score, found = await env.play(10, temperature=1.0)
        await env.evaluate()
        exam = dict(env.metrics)
        model.reply = lambda prompt, number: encoded("1")
        repeated = await env.play(2, temperature=1.0)
        model.reply = lambda prompt, number: encoded("x")
        group, _ = await env.collect_trajectories(3)
        return node, score, found, exam, repeated[1:], group

    node, score, found, exam, repeated, group = with_env(load_example("guess").Guess, model, use)
    # 8 is too small, 12 is too large, 10 is correct. The tokens of each turn are those that were sampled.
    turns = [encoded("8"), encoded("12"), encoded("10")]
    hints = [TOKENIZER.encode("1-15:"), list(b">"), list(b"<")]
    pairs = list(zip(hints, turns))
    assert node.tokens == [token for hint, turn in pairs for token in [*hint, *turn]]
    assert node.masked_tokens == [token for hint, turn in pairs for token in [*[-100] * len(hint), *turn]]
    # The score is the mean of the excluded fraction over 6 turns. The first guess excludes 8 of 15 numbers, and the
    # first two exclude 12. The other 4 turns count as 1.
    assert found and score == pytest.approx((8 / 15 + 12 / 15 + 4) / 6)
    assert exam["eval/found"] == 1.0 and 0.85 < exam["eval/score"] < 1
    assert repeated == (pytest.approx(1 / 15), False)
    assert group["scores"] == [0.0] * 4 and len(group["tokens"]) == 4 == len(group["inference_logprobs"])


def test_demonstrations_of_guess_are_valid_games():
    cls = load_example("guess").Guess
    config, servers = cls.config_init()
    demonstrations = cls(config, servers).demonstrations(random.Random(0), 200)
    games = [re.fullmatch(r"1-15:((?:\d+<\|eos\|>[<>])*)", prompt)[1] for prompt, _ in demonstrations]
    for game, (_, guess) in zip(games, demonstrations):
        turns = re.findall(r"(\d+)<\|eos\|>(.)", game)
        assert all(1 <= int(number) <= 15 for number, _ in [*turns, (guess, "")])
        low, high = [int(number) for number, hint in turns if hint == ">"], [int(n) for n, hint in turns if hint == "<"]
        assert max(low, default=0) + 1 < min(high, default=17)  # at least one number is left
    assert max(game.count("|eos|") for game in games) == 5 and {guess for _, guess in demonstrations} == {
        str(number) for number in range(1, 16)
    }


def test_calculator_example_scores_answers_and_tool_calls(model):
    def careful(prompt, number):
        """Return a correct answer: call the tool once for each operation, then give the last result."""
        lines = text_of(prompt).splitlines()
        product, rest = lines[0].rstrip("?").split("+")
        results = [line[1:] for line in lines if line.startswith("=")]
        if not results:
            return encoded(f"calc {product}")
        return encoded(f"calc {results[0]}+{rest}" if len(results) == 1 else results[1])

    async def use(env):
        model.reply = careful
        node, score, calls = await env.solve((17, 23, 4), temperature=1.0)
        await env.evaluate()
        exam = dict(env.metrics)
        model.reply = lambda prompt, number: encoded("calc 1/0")
        wrong = await env.solve((1, 1, 1), temperature=1.0)
        model.reply = lambda prompt, number: encoded("calc 1+1")
        endless = await env.solve((1, 1, 1), temperature=1.0)
        return node, score, calls, exam, wrong[1:], endless[1:]

    node, score, calls, exam, wrong, endless = with_env(load_example("calculator").Calculator, model, use)
    assert (score, calls) == (pytest.approx(1.1), 2)
    assert text_of(node.tokens) == "17*23+4?\ncalc 17*23\n=391\ncalc 391+4\n=395\n395"
    own = [token for token in node.masked_tokens if token != -100]
    assert own == [*encoded("calc 17*23"), *encoded("calc 391+4"), *encoded("395")]
    assert exam == {"eval/right": 1.0, "eval/calls": 2.0}
    assert wrong == (0.0, 0) and endless == (pytest.approx(0.1), 3)


def test_example_environment_of_the_docs_runs(tmp_path, monkeypatch, model):
    (tmp_path / "words.txt").write_text("one\ntwo\n")
    text = (ROOT / "docs/howto/language-environment.md").read_text()
    (source,) = re.findall(r"```python\n((?:(?!```).)*class Shout.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    from rlframe.language.environments import cli

    names = {"__name__": "shout"}
    exec(source, names)
    model.reply = lambda prompt, number: encoded(["ONE", "two"][number % 2])
    command = ["process", "--openai.base_url", model.url, "--env.total_steps", "5"]
    assert cli.run(names["Shout"], command) == 0
    groups = [json.loads(line) for line in (tmp_path / "data/shout.jsonl").read_text().splitlines()]
    assert len(groups) == 5 and {score for group in groups for score in group["scores"]} == {0.0, 1.0}


@pytest.mark.system
@pytest.mark.parametrize(("name", "cls"), [("reverse", "Reverse"), ("guess", "Guess"), ("calculator", "Calculator")])
def test_each_example_runs_the_process_command(tmp_path, monkeypatch, model, name, cls):
    source = random.Random(0)
    model.reply = lambda prompt, number: encoded(str(source.randrange(1, 16)))
    monkeypatch.chdir(tmp_path)
    from rlframe.language.environments import cli

    assert (
        cli.run(getattr(load_example(name), cls), ["process", "--openai.base_url", model.url, "--env.total_steps", "2"])
        == 0
    )
    groups = [json.loads(line) for line in (tmp_path / f"data/{name}.jsonl").read_text().splitlines()]
    assert [len(group["tokens"]) for group in groups] == [16, 16]
    assert (tmp_path / f"data/{name}.html").exists()
