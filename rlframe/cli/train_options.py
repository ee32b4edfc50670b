"""The options of `rlframe train`: those of a session, an experiment, its agent and its network, as one command line.

Which options there are depends on a few of them. `--agent dqn --head categorical --head.num-atoms 21`, step by step:

1. `peek` finds `--agent`, `--env`, `--network`, `--head` and a few others in the arguments.
2. `_defaults` returns the experiment that these name, with the values of its preset.
3. `_start` makes a dataclass for tyro, whose fields are the groups of options: the experiment, the session, the agent's
   config (with `head`, now a categorical one) and the network's config. `_flat_class` joins the options of the
   experiment and of every topology, so that `--num-actors` is known whatever the topology is.
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

from rlframe.cli.parsing import CommandOptions, parse, peek
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
    """Base of the dataclass that `_flat_class` makes: tyro finds the comments of options in the source by its name."""

    topology: str = ""  # which processes there are: docs/programs.md


def read_arguments(
    arguments: list[str],
    session_cls: type[TrainOptions] = TrainOptions,
    prog: str = PROG,
    description: str = DESCRIPTION,
) -> tuple[Experiment, TrainOptions, Preset | None]:
    """Parse the command line to an experiment, the options of a session, and the preset that it is based on.

    The options depend on the agent and network, and their defaults on the preset: those few are read first.

    Args:
        arguments: without the program and the command.
        session_cls: the class of the options beside those of an experiment.
        prog, description: of the command, as `parse` takes them.
    """
    here = pathlib.Path.cwd()  # before any code of the user's, which may change the directory
    defaults, preset = _defaults(arguments)
    start = _start(defaults, arguments, session_cls)
    elsewhere = functools.partial(_where_is, defaults.agent)
    parsed: Any = parse(type(start), arguments, prog, description, default=start, elsewhere=elsewhere)
    values = {name: getattr(parsed.experiment, name) for name in field_names(parsed.experiment) if name not in _HIDDEN}
    values["agent_config"] = parsed.agent_config
    if "network_config" in values:
        values["network_config"] = getattr(parsed, "network_config", None)
    if peek(arguments, "num-actors") is None and not hasattr(defaults.topology_config, "num_actors"):
        values.pop("num_actors", None)  # nobody gave it: its default depends on the number of environments
    experiment = from_flat(values)
    if parsed.session.resume and parsed.session.run_dir is None:
        raise UsageError("--resume needs --run-dir: the directory of the run to go on with.")
    paths = {name: getattr(parsed.session, name) for name in ("run_dir", "token_file")}
    paths = {name: str(here / path) for name, path in paths.items() if path is not None}
    return experiment, dataclasses.replace(parsed.session, **paths), preset


def _defaults(arguments: list[str]) -> tuple[Experiment, Preset | None]:
    """Return the defaults of the command line: a saved experiment, or those of its agent and environment."""
    config, run_dir, preset_name = peek(arguments, "config"), peek(arguments, "run-dir"), peek(arguments, "preset")
    session = SessionOptions(
        preset_name or "auto", config, run_dir, resume="--resume" in arguments and run_dir is not None
    )
    network = peek(arguments, "network")
    defaults, preset = starting_point(peek(arguments, "agent"), peek(arguments, "env"), session, network)
    topology = defaults.topology_config
    if network is not None and network != getattr(topology, "network", network):
        defaults = with_fields(defaults, network=None if network == "None" else network, network_config=None)
    defaults = fill_configs(defaults)
    names = {name: peek(arguments, name.replace("_", "-")) for name in field_names(defaults.agent_config)}
    return dataclasses.replace(defaults, agent_config=with_choices(defaults.agent_config, names)), preset


def _where_is(agent: str, option: str) -> str:
    """Call `where_is` for an option as the command line has it: `--x-y`."""
    return where_is(agent, option.removeprefix("--").replace("-", "_").removeprefix("no_"), "--{} {}")


def _start(defaults: Experiment, arguments: list[str], session_cls: type[TrainOptions]) -> Any:
    """Make the dataclass for tyro: experiment, session, agent config, its choices, and network config with a prefix."""
    annotated: Any = Annotated
    flat_options = tyro.conf.OmitArgPrefixes
    config, config_cls = defaults.agent_config, type(defaults.agent_config)
    values = {**to_flat(defaults), "agent_config": None}
    network = values.get("network_config")
    if network is not None:
        values["network_config"] = None
    experiment = _flat_class(defaults, arguments)(**values)
    _check_no_clash(config_cls, defaults.agent, {*field_names(experiment), *field_names(session_cls)} - _HIDDEN)
    choices: list[Any] = [
        (name, Annotated[Literal.__getitem__(tuple(known)), tyro.conf.arg(help=f"Its options are --{name}.*")])
        for name, hint in hints_of(config_cls).items()
        if (known := choices_of(hint))
    ]
    chosen_cls: Any = dataclasses.make_dataclass("Choices", choices)
    chosen_now = chosen_cls(**{name: getattr(config, name).name for name, _ in choices})
    parts: dict[str, Any] = {
        "experiment": (experiment, (tyro.conf.arg(name=""), flat_options)),
        "session": (session_cls(), (tyro.conf.arg(name=""), flat_options)),
        "agent_config": (config, (tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands)),  # its own parts keep prefixes
        "choices": (chosen_now, (tyro.conf.arg(name=""), flat_options)),
    }
    if network is not None:
        parts["network_config"] = (network, (tyro.conf.arg(name="network"),))
    fields = [(name, operator.getitem(annotated, (type(part), *marks))) for name, (part, marks) in parts.items()]
    made = dataclasses.make_dataclass("Train", fields, frozen=True)
    return made(**{name: part for name, (part, _) in parts.items()})


def _flat_class(defaults: Experiment, arguments: list[str]) -> Any:
    """Join the options of an experiment and of every topology of its agent in one dataclass.

    The choices of an option include the user's `file.py:Name` if the command line has it.
    """
    classes = config_classes(defaults.agent, peek(arguments, "topology") or defaults.topology_config.name)
    every = dict.fromkeys(classes.values())
    widest = [cls for cls in every if not any(other is not cls and issubclass(other, cls) for other in every)]
    choices: dict[str, Iterable[str]] = {
        "topology": classes,
        "engine": ("auto", *registry.ENGINES),
        "operator": ("auto", *registry.OPERATORS),
        "replay": ("auto", *registry.REPLAYS),
    }
    hidden = Annotated[Any, tyro.conf.Suppress]
    # `async` is a keyword of Python.
    annotations: dict[str, Any] = {
        "async_envs": Annotated[bool, tyro.conf.arg(name="async")],
        **dict.fromkeys((*_HIDDEN, "agent_config", "network_config"), hidden),
    }
    own = {field.name: field.default for cls in widest for field in dataclasses.fields(cls)}
    own = {**own, **dict.fromkeys(_HIDDEN, ""), **to_flat(defaults)}
    for name, known in choices.items():
        named = [each for each in (peek(arguments, name), own.get(name)) if isinstance(each, str) and ":" in each]
        annotations[name] = Literal.__getitem__((*known, *named))
    annotations = {name: annotation for name, annotation in annotations.items() if name in own}
    namespace = {
        "__annotations__": annotations,
        "__module__": __name__,
        "__post_init__": lambda self: None,  # values are checked when the experiment is made
        **{name: own[name] for name in annotations},
    }
    # The parser finds the source by the class name, then that of the bases: their comments are the help.
    made = type(ExperimentOptions.__name__, (*widest, Experiment, ExperimentOptions), namespace)
    return dataclasses.dataclass(frozen=True)(made)


def _check_no_clash(config_cls: type, agent: str, taken: set[str]) -> None:
    for name in field_names(config_cls):
        if name in taken:
            raise UsageError(
                f"The config of {agent} has a field {name!r}, which is an option of `{PROG}` already: rename it."
            )
