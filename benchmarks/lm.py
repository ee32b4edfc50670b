"""Language models: tokens/s of the decode engine, the learner and the policy server.

Engine and learner are compared with their jitted steps alone, and the policy server with its engine.
"""

from __future__ import annotations

from benchmarks.context import Context, run_interleaved
from benchmarks.report import Row, Table, median, processor

MODELS = {"small": "4 layers of 128", "large": "6 layers of 256"}  # models of `benchmarks/ours/decode.py`
TARGET, LEARNING_TARGET, ENGINE_TARGET = 0.7, 0.8, 0.8


def run(context: Context, log=print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    measures = (_decoding, _serving, _learning)
    return [measure(context, model, log) for measure in measures for model in MODELS]


def _decoding(context: Context, model: str, log) -> Table:
    seconds = context.steps(8, 1)
    contenders = {model: lambda: context.ours("decode", model, "--seconds", seconds)}
    results, failures = run_interleaved(contenders, context.repeats, log)
    engine, alone = (median(result[way] for result in results[model]) for way in ("engine", "alone"))
    note = failures.get(model, "")
    return Table(
        f"Decoding, 32 slots, answers of 32 to 128 tokens: {MODELS[model]}",
        "tokens/s",
        Row("the engine", engine, None, note, processor(results[model])),
        (Row("the jitted step alone", alone, TARGET, note),),
    )


def _serving(context: Context, model: str, log) -> Table:
    seconds = context.steps(8, 1)
    contenders = {model: lambda: context.ours("policy", model, "--seconds", seconds)}
    results, failures = run_interleaved(contenders, context.repeats, log)
    served, engine = (median(result[way] for result in results[model]) for way in ("http", "engine"))
    note = failures.get(model, "")
    return Table(
        f"The policy server, 64 connections, 32 slots: {MODELS[model]}",
        "tokens/s",
        Row("through HTTP", served, None, note, processor(results[model])),
        (Row("its engine, called directly", engine, ENGINE_TARGET, note),),
    )


def _learning(context: Context, model: str, log) -> Table:
    options = ("--seconds", context.steps(8, 1), "--batches", context.steps(8, 2))
    contenders = {model: lambda: context.ours("learn", model, *options)}
    results, failures = run_interleaved(contenders, context.repeats, log)
    learner, alone, padding = (
        median(result[way] for result in results[model]) for way in ("learner", "alone", "padding")
    )
    note = failures.get(model, "")
    return Table(
        f"Learning by GRPO, 32 sequences of 32 to 128 tokens from the service: {MODELS[model]}",
        "tokens/s",
        Row("the learner", learner, None, note, processor(results[model])),
        (Row("the jitted update alone", alone, LEARNING_TARGET, note),),
        note="" if padding is None else f"Padding is not counted. It is {padding:.0%} of the computed tokens.",
    )
