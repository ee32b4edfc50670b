"""The options of `rlframe train`: those of a session, an experiment, its agent and its network, as one command line.

Which options there are depends on a few of them. `--agent dqn --head categorical --head.num-atoms 21`, step by step:

1. `value_before_parsing` finds `--agent`, `--env`, `--network`, `--head` and a few others in the arguments.
2. `_defaults` returns the experiment that these name, with the values of its preset.
3. `_default_options` makes a dataclass for tyro, whose fields are the groups of options: the experiment, the session,
   the agent's config (with `head`, now a categorical one) and the network's config. `_experiment_options_class` joins
   the options of the experiment and of every topology, so that `--num-actors` is known whatever the topology is.
4. tyro parses all arguments, with these defaults: `head.num_atoms` is 21.
5. `from_flat` makes the `Experiment` of the values.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import pathlib
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union

import tyro

from rlframe.cli.parsing import CommandOptions, parse, value_before_parsing
from rlframe.errors import UsageError
from rlframe.programs.api import SessionOptions, starting_point
from rlframe.programs.experiment import Experiment
from rlframe.programs.options import registry
from rlframe.programs.options.fields import choices_of, field_names, hints_of, with_choices
from rlframe.programs.options.make_experiment import (
    config_classes,
    fill_configs,
    from_flat,
    to_flat,
    where_is,
    with_fields,
)
from rlframe.programs.presets import Preset
from rlframe.programs.topologies.config import AgentOptions, GameProgram

PROG = "rlframe train"
_HIDDEN = {"name", "topology_config"}  # fields of which `topology` is the option
DESCRIPTION = (
    "Train an agent on an environment. The defaults below are those of the agent and environment given, with their "
    "preset. Ctrl-C saves everything and exits with 130; --resume goes on."
)


@dataclasses.dataclass(frozen=True)
class TrainOptions(CommandOptions, SessionOptions):
    """Options of a session. Those below exist only on the command line."""

    seeds: Union[str, None] = None  # 1-5 or 1,2,7: a run for each, in RUN_DIR/seed-1 and so on; one table and one plot
    at_once: int = 1  # with --seeds: how many runs at a time
    json: bool = False  # print the result as one JSON object, the last line of stdout


@dataclasses.dataclass(frozen=True)
class ExperimentOptions:
    """Base of the class of this name that `_experiment_options_class` makes.

    tyro looks up the source by a class's name, then by those of its bases: their comments are the help of options.
    """

    topology: str = ""  # which processes there are: docs/programs.md


def read_arguments(
    arguments: list[str],
    options_cls: type[TrainOptions] = TrainOptions,
    prog: str = PROG,
    description: str = DESCRIPTION,
) -> tuple[Experiment, TrainOptions, Preset | None]:
    """Parse the command line to an experiment, the options of a session, and the preset that it is based on.

    The options depend on the agent and network, and their defaults on the preset: those few are read first.

    Args:
        arguments: without the program and the command.
        options_cls: the class of the options beside those of an experiment.
        prog, description: of the command, as `parse` takes them.
    """
    here = pathlib.Path.cwd()  # before any code of the user's, which may change the directory
    defaults, preset = _defaults(arguments)
    start = _default_options(defaults, arguments, options_cls)
    elsewhere = functools.partial(_where_is, defaults.agent)
    parsed: Any = parse(type(start), arguments, prog, description, default=start, elsewhere=elsewhere)
    values = {name: getattr(parsed.experiment, name) for name in field_names(parsed.experiment) if name not in _HIDDEN}
    values["agent_config"] = parsed.agent_config
    if "network_config" in values:
        values["network_config"] = getattr(parsed, "network_config", None)
    if value_before_parsing(arguments, "num-actors") is None and not isinstance(defaults.topology_config, GameProgram):
        values.pop("num_actors", None)  # nobody gave it: its default depends on the number of environments
    experiment = from_flat(values)
    if parsed.session.resume and parsed.session.run_dir is None:
        raise UsageError("--resume needs --run-dir: the directory of the run to go on with.")
    paths = {name: getattr(parsed.session, name) for name in ("run_dir", "token_file")}
    paths = {name: str(here / path) for name, path in paths.items() if path is not None}
    return experiment, dataclasses.replace(parsed.session, **paths), preset


def _defaults(arguments: list[str]) -> tuple[Experiment, Preset | None]:
    """Return the defaults of the command line: a saved experiment, or those of its agent and environment."""
    given = functools.partial(value_before_parsing, arguments)
    run_dir, network = given("run-dir"), given("network")
    resume = "--resume" in arguments and run_dir is not None
    session = SessionOptions(preset=given("preset") or "auto", config=given("config"), run_dir=run_dir, resume=resume)
    defaults, preset = starting_point(given("agent"), given("env"), session, network)
    topology = defaults.topology_config
    if network is not None and isinstance(topology, AgentOptions) and network != topology.network:
        defaults = with_fields(defaults, network=None if network == "None" else network, network_config=None)
    defaults = fill_configs(defaults)
    names = {name: given(name.replace("_", "-")) for name in field_names(defaults.agent_config)}
    return dataclasses.replace(defaults, agent_config=with_choices(defaults.agent_config, names)), preset


def _where_is(agent: str, option: str) -> str:
    """Call `where_is` for an option as the command line has it: `--x-y`."""
    return where_is(agent, option.removeprefix("--").replace("-", "_").removeprefix("no_"), "--{} {}")


def _default_options(defaults: Experiment, arguments: list[str], options_cls: type[TrainOptions]) -> Any:
    """Return all options with their defaults, in a dataclass for tyro. For `--agent dqn --head categorical`:

    Train(
        experiment=ExperimentOptions(topology="single_process", agent="dqn", ...),      # --topology, --agent
        session=TrainOptions(preset="auto", run_dir=None, ...),                         # --preset, --run-dir
        agent_config=DQNConfig(batch_size=64, head=Categories(num_atoms=51), ...),     # --batch-size, --head.num-atoms
        choices=Choices(head="categorical"),                                            # --head
        network_config=MLPConfig(hidden=(120, 84), ...),                                # --network.hidden
    )
    """
    annotated: Any = Annotated
    flat = (tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes)  # options have no prefix
    config, values = defaults.agent_config, to_flat(defaults)
    network = values.get("network_config")
    values |= dict.fromkeys({"agent_config", "network_config"} & values.keys())  # they have parts of their own
    experiment = _experiment_options_class(defaults, arguments)(**values)
    _check_no_clash(type(config), defaults.agent, {*field_names(experiment), *field_names(options_cls)} - _HIDDEN)
    choices: list[Any] = [
        (name, Annotated[Literal.__getitem__(tuple(known)), tyro.conf.arg(help=f"Its options are --{name}.*")])
        for name, hint in hints_of(type(config)).items()
        if (known := choices_of(hint))
    ]
    choices_cls: Any = dataclasses.make_dataclass("Choices", choices)
    parts: dict[str, Any] = {
        "experiment": (experiment, flat),
        "session": (options_cls(), flat),
        "agent_config": (config, (tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands)),  # its own parts keep prefixes
        "choices": (choices_cls(**{name: getattr(config, name).name for name, _ in choices}), flat),
    }
    if network is not None:
        parts["network_config"] = (network, (tyro.conf.arg(name="network"),))
    fields = [(name, operator.getitem(annotated, (type(part), *marks))) for name, (part, marks) in parts.items()]
    made = dataclasses.make_dataclass("Train", fields, frozen=True)
    return made(**{name: part for name, (part, _) in parts.items()})


def _experiment_options_class(defaults: Experiment, arguments: list[str]) -> Any:
    """Make the class of the options of an experiment and of every topology of its agent. For `--agent dqn`:

        @dataclasses.dataclass(frozen=True)
        class ExperimentOptions(SingleProcess, HeavyEnv, Distributed, Elastic, ..., Experiment, ExperimentOptions):
            async_envs: Annotated[bool, tyro.conf.arg(name="async")] = False  # `async` is a keyword
            name: Annotated[Any, tyro.conf.Suppress] = ""   # no option; nor are topology_config and agent_config
            topology: Literal["single_process", "heavy_env", ...] = "single_process"
            replay: Literal["auto", "shared_memory", ..., "file.py:Name"] = "auto"  # the last if the user names it

    All other fields are those of the bases. Values are checked when the experiment is made, not here.
    """
    given = functools.partial(value_before_parsing, arguments)
    classes = config_classes(defaults.agent, given("topology") or defaults.topology_config.name)
    every = dict.fromkeys(classes.values())
    bases = [cls for cls in every if not any(other is not cls and issubclass(other, cls) for other in every)]
    values = {field.name: field.default for cls in bases for field in dataclasses.fields(cls)}
    values = {**values, **dict.fromkeys(_HIDDEN, ""), **to_flat(defaults)}
    annotations: dict[str, Any] = {
        "async_envs": Annotated[bool, tyro.conf.arg(name="async")],
        **dict.fromkeys((*_HIDDEN, "agent_config", "network_config"), Annotated[Any, tyro.conf.Suppress]),
    }
    choices: dict[str, Iterable[str]] = {
        "topology": classes,
        "engine": ("auto", *registry.ENGINES),
        "operator": ("auto", *registry.OPERATORS),
        "replay": ("auto", *registry.REPLAYS),
    }
    for name, known in choices.items():
        named = [each for each in (given(name), values.get(name)) if isinstance(each, str) and ":" in each]
        annotations[name] = Literal.__getitem__((*known, *named))
    return dataclasses.make_dataclass(
        ExperimentOptions.__name__,  # by which tyro finds the help of `topology`
        [(name, hint, values[name]) for name, hint in annotations.items() if name in values],
        bases=(*bases, Experiment, ExperimentOptions),
        namespace={"__module__": __name__, "__post_init__": lambda self: None},
        frozen=True,
    )


def _check_no_clash(config_cls: type, agent: str, taken: set[str]) -> None:
    for name in field_names(config_cls):
        if name in taken:
            raise UsageError(
                f"The config of {agent} has a field {name!r}, which is an option of `{PROG}` already: rename it."
            )
