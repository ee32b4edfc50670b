"""The options of `rlframe train`: options of the session, the experiment, the agent's config and the network's config.

A few options determine which other options exist. `--agent dqn --head categorical --head.num-atoms 21`, step by step:

1. `EarlyOptions.read` finds `--agent`, `--env`, `--network`, `--head` and a few others in the raw arguments.
2. `_defaults` returns an experiment with this agent, environment, network and head, and with the values of its preset.
3. `_tyro_defaults` creates a dataclass for tyro. Its fields are the groups of options: the experiment, the session, the
   agent's config (here with a categorical `head`) and the network's config. `_flat_options_class` joins the options of
   the experiment and of all topologies, so `--num-actors` exists for every topology.
4. tyro parses all arguments with these defaults: `head.num_atoms` is 21.
5. `_given_options` returns the options that the arguments change: `{"head.num_atoms": 21}`. `change_options` applies
   them to the experiment. Scripts use the same function.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Union

import tyro
from tyro.extras import literal_type_from_choices as literal

from rlframe.cli.help import OptionField, format_help
from rlframe.cli.parsing import CommandOptions, make_options, parse, raw_option_values
from rlframe.errors import UsageError
from rlframe.programs.api import SessionOptions, base_experiment, with_absolute_paths
from rlframe.programs.experiment import Experiment
from rlframe.programs.options import registry
from rlframe.programs.options.fields import choices_of, field_names, hints_of, option
from rlframe.programs.options.make_experiment import (
    all_option_values,
    change_options,
    config_classes,
    describe_option_owner,
    to_flat,
)
from rlframe.programs.presets import Preset

PROG = "rlframe train"
_HIDDEN = {"name", "topology_config"}  # fields without an option: `--topology` sets them
DESCRIPTION = (
    "Train an agent on an environment. `rlframe agents` and `rlframe envs` list the names. Ctrl-C saves everything and "
    "exits with 130; --resume continues the run."
)


@dataclasses.dataclass(frozen=True)
class TrainOptions(CommandOptions, SessionOptions):
    """Options of a session, plus options that exist only on the command line."""

    # Seeds such as 1-5 or 1,2,7. Each seed is one run, in RUN_DIR/seed-N.
    seeds: Union[str, None] = option(None, multi_run="command")
    # With --seeds: number of processes. None: 1, or with fused one for all seeds.
    at_once: Union[int, None] = option(None, multi_run="command")
    # Print the result as one JSON object in the last line.
    json: bool = option(False, multi_run="command", group="Logging")


@dataclasses.dataclass(frozen=True)
class TopologyOption:
    """The option `--topology`. This class is the last base class, so that `--topology` comes first in the help."""

    help_group = "Processes"

    # Processes of the run. heavy_env: actors that run the network; light_env: actors that call an inference service;
    # distributed: light_env on several machines; elastic: a changing number of actors. These four start actor
    # processes (--num-actors). fused: one jitted call, for JAX environments.
    topology: str = ""


@dataclasses.dataclass(frozen=True)
class EarlyOptions:
    """The options that determine which other options exist. They are read before the arguments are parsed."""

    agent: Union[str, None]
    env: Union[str, None]
    network: Union[str, None]
    session: SessionOptions  # only `preset`, `config`, `run_dir` and `resume` are set
    texts: dict[str, str]  # all given options, from `raw_option_values`

    @classmethod
    def read(cls, arguments: Sequence[str]) -> EarlyOptions:
        """Find the options in the raw arguments."""
        texts = raw_option_values(arguments)
        run_dir = texts.get("run_dir") or None
        session = SessionOptions(
            preset=texts.get("preset") or "auto",
            config=texts.get("config") or None,
            run_dir=run_dir,
            resume="resume" in texts and run_dir is not None,
        )
        agent, env, network = (texts.get(name) or None for name in ("agent", "env", "network"))
        return cls(agent, env, network, session, texts)


def read_arguments(
    arguments: list[str],
    options_cls: type[TrainOptions] = TrainOptions,
    prog: str = PROG,
    description: str = DESCRIPTION,
) -> tuple[Experiment, TrainOptions, Preset | None]:
    """Parse the command line. Return an experiment, the options of a session, and the preset (None without a preset).

    The agent and the network determine which options exist. The preset determines the defaults. So `--agent`,
    `--network` and `--preset` are read first.

    Args:
        arguments: arguments after the name of the command.
        options_cls: class of the options that are not part of the experiment.
        prog, description: name and description of the command, as for `parse`.
    """
    here = pathlib.Path.cwd()  # user code, which runs later, may change the working directory
    early = EarlyOptions.read(arguments)
    defaults, preset = _defaults(early)
    tyro_defaults = _tyro_defaults(defaults, early, options_cls)
    describe_owner = functools.partial(_where_is, defaults.agent)
    parsed: Any = parse(
        type(tyro_defaults),
        arguments,
        prog,
        description,
        default=tyro_defaults,
        describe_owner=describe_owner,
        help_format=functools.partial(_format_help, defaults, early),
    )
    experiment = change_options(defaults, _given_options(tyro_defaults, parsed, early))
    if parsed.session.resume and parsed.session.run_dir is None:
        raise UsageError("--resume needs --run-dir: the directory of the run to continue.")
    return experiment, with_absolute_paths(parsed.session, here), preset


def _format_help(
    defaults: Experiment, early: EarlyOptions, fields: Sequence[OptionField], prog: str, description: str, width: int
) -> str:
    """Return the text for `--help`: in groups, the options that the topology uses.

    Options whose comment starts with "Internal:" are not shown, because the program sets them.
    """
    topologies = config_classes(defaults.agent, defaults.topology_config.name, early.texts.get("topology"))
    chosen = early.texts.get("topology") or defaults.topology_config.name
    unused: set[str] = set()
    if (used := topologies.get(chosen)) is not None:
        every = {name for cls in topologies.values() for name in field_names(cls)}
        unused = every - {*field_names(used)} | {*used.hidden}
        unused |= set() if used.can_profile else {"profile", "profile_trace"}
    shown = [each for each in fields if _field_name(each) not in unused and not each.text.startswith("Internal:")]
    other = next((name for name in topologies if name != chosen), chosen)
    names = f"--agent {defaults.agent}, --env {defaults.env} and --topology {chosen}"
    description = f"{description} The options and defaults below are for {names}."
    last = (
        f"For the options of another topology, name it before --help: `{prog} --topology {other} --help`. "
        "This also works with --agent, --env and --network."
    )
    return format_help(shown, prog, description, width, "Agent", last)


def _field_name(field: OptionField) -> str:
    return "async_envs" if field.name == "async" else field.name


def _defaults(early: EarlyOptions) -> tuple[Experiment, Preset | None]:
    """Return the default experiment of the command line, from a saved run or from the given agent and environment.

    It contains the given network and the given choices in the agent's config (such as a head), because a network or a
    head has options with defaults, too.
    """
    defaults, preset = base_experiment(early.agent, early.env, early.session, early.network)
    choosers = [name for name, hint in hints_of(type(defaults.agent_config)).items() if choices_of(hint)]
    choices: dict[str, Any] = {name: early.texts[name] for name in choosers if early.texts.get(name)}
    if early.network is not None and "network" in to_flat(defaults):
        choices["network"] = None if early.network == "None" else early.network
    return change_options(defaults, choices), preset


def _given_options(tyro_defaults: Any, parsed: Any, early: EarlyOptions) -> dict[str, Any]:
    """Return {name: value} of the experiment's options that the user gave, except `--agent`. For `change_options`.

    An option is also returned if the user gave its default value: `--num-actors 2` requires two actors, even if there
    are too few environments.
    """
    before, now = _options_of_experiment(tyro_defaults), _options_of_experiment(parsed)
    given = {name: value for name, value in now.items() if value != before[name] or name in early.texts}
    given.pop("agent", None)
    return given


def _options_of_experiment(options: Any) -> dict[str, Any]:
    """Return {name: value} of all options, except the session's options."""
    return all_option_values(vars(options.experiment), options.agent_config, getattr(options, "network_config", None))


def _where_is(agent: str, option: str) -> str:
    """Call `describe_option_owner` for an option that is written as on the command line: `--x-y`."""
    return describe_option_owner(agent, option.removeprefix("--").replace("-", "_").removeprefix("no_"), "--{} {}")


def _tyro_defaults(defaults: Experiment, early: EarlyOptions, options_cls: type[TrainOptions]) -> Any:
    """Return a dataclass for tyro that contains all options with their defaults. For `--agent dqn --head categorical`:

    Train(
        experiment=FlatOptions(topology="single_process", agent="dqn", ...),           # --topology, --agent
        session=TrainOptions(preset="auto", run_dir=None, ...),                        # --preset, --run-dir
        agent_config=DQNConfig(batch_size=64, head=Categories(num_atoms=51), ...),     # --batch-size, --head.num-atoms
        choices=Choices(head="categorical"),                                           # --head
        network_config=MLPConfig(hidden=(120, 84), ...),                               # --network.hidden
    )
    """
    config, values = defaults.agent_config, to_flat(defaults)
    network = values.get("network_config")
    values |= dict.fromkeys({"agent_config", "network_config"} & values.keys())  # they are separate fields of `Train`
    experiment, session = _flat_options_class(defaults, early)(**values), options_cls()
    _check_no_clash(type(config), defaults.agent, {*field_names(experiment), *field_names(session)} - _HIDDEN)
    choosers: dict[str, tuple[Any, Any]] = {
        name: (Annotated[literal(known), tyro.conf.arg(help=f"Its options are --{name}.*")], getattr(config, name).name)
        for name, hint in hints_of(type(config)).items()
        if (known := choices_of(hint))
    }
    choices = make_options("Choices", choosers)
    no_prefix = tyro.conf.arg(name="")
    parts: dict[str, tuple[Any, Any]] = {
        "experiment": (Annotated[type(experiment), no_prefix, tyro.conf.OmitArgPrefixes], experiment),
        "session": (Annotated[type(session), no_prefix, tyro.conf.OmitArgPrefixes], session),
        # The options of configs inside the agent's config keep their prefixes, such as `head.`.
        "agent_config": (Annotated[type(config), no_prefix, tyro.conf.AvoidSubcommands], config),
        "choices": (Annotated[type(choices), no_prefix, tyro.conf.OmitArgPrefixes], choices),
    }
    if network is not None:
        parts["network_config"] = (Annotated[type(network), tyro.conf.arg(name="network")], network)
    return make_options("Train", parts)


def _flat_options_class(defaults: Experiment, early: EarlyOptions) -> Any:
    """Create a class with the options of an experiment and of all topologies of its agent. For `--agent dqn`:

        @dataclasses.dataclass(frozen=True)
        class FlatOptions(SingleProcess, HeavyEnv, Distributed, Elastic, ..., Experiment, TopologyOption):
            async_envs: Annotated[bool, tyro.conf.arg(name="async")] = False  # `async` is a keyword
            name: Annotated[Any, tyro.conf.Suppress] = ""   # not an option, like topology_config and agent_config
            topology: Literal["single_process", "heavy_env", ...] = "single_process"
            replay: Literal["auto", "shared_memory", ..., "file.py:Name"] = "auto"  # "file.py:Name" only if given

    All other fields are inherited. Values are checked later, when the experiment is created.
    """
    classes = config_classes(defaults.agent, defaults.topology_config.name, early.texts.get("topology"))
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
        named = [each for each in (early.texts.get(name), values.get(name)) if isinstance(each, str) and ":" in each]
        annotations[name] = literal((*known, *named))
    return dataclasses.make_dataclass(
        "FlatOptions",
        [(name, hint, values[name]) for name, hint in annotations.items() if name in values],
        bases=(*bases, Experiment, TopologyOption),
        namespace={"__post_init__": lambda self: None},
        frozen=True,
    )


def _check_no_clash(config_cls: type, agent: str, taken: set[str]) -> None:
    for name in field_names(config_cls):
        if name in taken:
            raise UsageError(
                f"The config of {agent} has a field {name!r}, but `{PROG}` already has an option of this name. Rename "
                "the field."
            )
