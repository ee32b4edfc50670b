"""The topology elastic: a coordinator starts and stops workers during the run.

The coordinator is the only node of the program. The launcher owns the workers and the shared memory (of the replay
buffer and the parameters), so these remain if the coordinator dies.
"""

from __future__ import annotations

import dataclasses
from typing import Union

from rlframe.engines import Engine
from rlframe.errors import UsageError
from rlframe.programs.options import registry
from rlframe.programs.options.fields import option
from rlframe.programs.session import Session
from rlframe.programs.topologies.config import GameProgram, configured_by


@dataclasses.dataclass(frozen=True)
class Elastic(GameProgram):
    """Options of the topology elastic."""

    control_group = "coordinator"
    accepts_custom_replay = False  # elastic needs item keys, which only built-in replay buffers have

    help_group = "Elastic and cluster"

    name: str = "elastic"
    # With elastic: operator that starts workers: local, ray or file.py:Class. auto means the operator of the engine.
    operator: str = option("auto", changeable=True)
    min_actors: int = option(1, at_least=1, changeable=True)  # With elastic: minimum number of actors.
    # With elastic: maximum number of actors. Automatic scaling is also limited by the number of cores.
    max_actors: int = 8
    # With elastic: stop actors if the mean staleness exceeds this number of versions. None means no limit.
    mean_staleness: Union[float, None] = option(None, above=0, changeable=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_actors < self.min_actors:
            raise UsageError(f"max_actors must be at least min_actors, got {self.max_actors} and {self.min_actors}.")
        if self.engine_class.operator is None:
            raise UsageError(
                f"elastic needs an operator, which starts its workers, but the engine {self.engine_name} has none. "
                "Choose another engine."
            )
        if self.operator == "ray" and self.engine_class.operator != "ray":
            raise UsageError(
                f"The operator ray needs the engine ray, but the engine is {self.engine_name}. Add --engine ray (and "
                "--ray-address for an existing cluster), or leave --operator out."
            )
        if self.operator_name not in registry.OPERATORS and ":" not in self.operator:
            registry.operator_class(self.operator)

    @property
    def operator_name(self) -> str:
        """The operator: a name or `file.py:Class`."""
        return self.operator if self.operator != "auto" else self.engine_class.operator or "local"

    @property
    def spans_machines(self) -> bool:
        """True if workers can run on other machines than the launcher."""
        return self.operator_name == "ray" and self.replay_kind == "service"


@configured_by(Elastic)
def elastic(engine: Engine, session: Session) -> None:
    """Add the nodes of `elastic_nodes.py`."""
    from rlframe.programs.topologies.elastic_nodes import add_nodes  # imports the coordinator

    add_nodes(engine, session)
