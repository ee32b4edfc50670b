"""Tables for a person."""

from __future__ import annotations

from typing import Any, TextIO

from rlframe.metrics.terminal import console
from rlframe.programs.experiment import flat
from rlframe.programs.presets import Preset


def print_preset(preset: Preset, experiment: Any, file: TextIO) -> None:
    """Print a preset's values with their sources; what the command line changed is marked.

    Where it chose another network, the options of the preset's are left out: they are not used.

    Args:
        preset: the table.
        experiment: what runs; None where nothing does.
        file: where to.
    """
    from rich.table import Table

    table = Table(title=f"preset {preset.name}", title_justify="left", box=None, pad_edge=False)
    for column in ("field", "value", "source"):
        table.add_column(column, overflow="fold")
    network = preset.fields.get("network")
    has_its_network = experiment is None or network is None or _used(experiment, "network") == network.value
    for key, setting in preset.fields.items():
        if key.startswith("network.") and not has_its_network:
            continue
        used = setting.value if experiment is None else _used(experiment, key)
        same = used == setting.value
        value = str(setting.value) if same else f"{used} (preset: {setting.value})"
        table.add_row(key.rpartition("agent.")[2], value, setting.source if same else "command line")
    console(file).print(table)


def plus_minus(std: float | None, count: int) -> str:
    """Return " ± std", or nothing for a single value, which has no spread."""
    return f" ± {std:.1f}" if std is not None and count > 1 else ""


def _used(experiment: Any, key: str) -> Any:
    group, _, name = key.rpartition(".")
    options = flat(experiment)
    return getattr(options.get(f"{group}_config"), name, None) if group else options.get(name)
