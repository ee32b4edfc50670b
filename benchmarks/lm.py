"""Language models: tokens/s of the decode engine, against the model's jitted decoding step alone at the same batch."""

from __future__ import annotations

from benchmarks.context import Context, in_turns
from benchmarks.report import Row, Table, middle

MODELS = {"small": "4 layers of 128", "large": "6 layers of 256"}  # of `benchmarks/ours/decode.py`
WANTED = 0.7


def run(context: Context, say=print) -> list[Table]:
    """Measures; see `benchmarks.runner`."""
    return [_decoding(context, model, say) for model in MODELS]


def _decoding(context: Context, model: str, say) -> Table:
    seconds = context.steps(8, 1)
    contenders = {model: lambda: context.ours("decode", model, "--seconds", seconds)}
    results, failures = in_turns(contenders, context.repeats, say)
    engine, alone = (middle(result[way] for result in results[model]) for way in ("engine", "alone"))
    note = failures.get(model, "")
    return Table(
        f"Decoding, 32 slots, answers of 32 to 128 tokens: {MODELS[model]}",
        "tokens/s",
        Row("the engine", engine, note=note),
        (Row("the jitted step alone", alone, WANTED, note),),
    )
