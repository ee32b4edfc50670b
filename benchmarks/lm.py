"""Language models: tokens/s of the decode engine, of the learner (each against its jitted step alone), and of the
policy server against its engine."""

from __future__ import annotations

from benchmarks.context import Context, in_turns
from benchmarks.report import Row, Table, middle, processor

MODELS = {"small": "4 layers of 128", "large": "6 layers of 256"}  # of `benchmarks/ours/decode.py`
WANTED, WANTED_OF_LEARNING, WANTED_OF_ENGINE = 0.7, 0.8, 0.8


def run(context: Context, say=print) -> list[Table]:
    """Measures; see `benchmarks.runner`."""
    measures = (_decoding, _serving, _learning)
    return [measure(context, model, say) for measure in measures for model in MODELS]


def _decoding(context: Context, model: str, say) -> Table:
    seconds = context.steps(8, 1)
    contenders = {model: lambda: context.ours("decode", model, "--seconds", seconds)}
    results, failures = in_turns(contenders, context.repeats, say)
    engine, alone = (middle(result[way] for result in results[model]) for way in ("engine", "alone"))
    note = failures.get(model, "")
    return Table(
        f"Decoding, 32 slots, answers of 32 to 128 tokens: {MODELS[model]}",
        "tokens/s",
        Row("the engine", engine, None, note, processor(results[model])),
        (Row("the jitted step alone", alone, WANTED, note),),
    )


def _serving(context: Context, model: str, say) -> Table:
    seconds = context.steps(8, 1)
    contenders = {model: lambda: context.ours("policy", model, "--seconds", seconds)}
    results, failures = in_turns(contenders, context.repeats, say)
    served, engine = (middle(result[way] for result in results[model]) for way in ("http", "engine"))
    note = failures.get(model, "")
    return Table(
        f"The policy server, 64 connections, 32 slots: {MODELS[model]}",
        "tokens/s",
        Row("through HTTP", served, None, note, processor(results[model])),
        (Row("its engine, asked directly", engine, WANTED_OF_ENGINE, note),),
    )


def _learning(context: Context, model: str, say) -> Table:
    seconds = context.steps(8, 1)
    contenders = {model: lambda: context.ours("learn", model, "--seconds", seconds)}
    results, failures = in_turns(contenders, context.repeats, say)
    learner, alone, padding = (
        middle(result[way] for result in results[model]) for way in ("learner", "alone", "padding")
    )
    note = failures.get(model, "")
    return Table(
        f"Learning by GRPO, 32 sequences of 32 to 128 tokens from the service: {MODELS[model]}",
        "tokens/s",
        Row("the learner", learner, None, note, processor(results[model])),
        (Row("the jitted update alone", alone, WANTED_OF_LEARNING, note),),
        note="" if padding is None else f"Not counted: padding, {padding:.0%} of what is computed.",
    )
