"""`rlframe train`."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Annotated, Any, Literal, Union

import tyro

from rlframe.cli.parsing import parse, peek
from rlframe.errors import UsageError
from rlframe.programs import naming
from rlframe.programs.experiment import Experiment, complete, experiment_class, load_experiment, with_preset
from rlframe.programs.language.description import LanguageExperiment
from rlframe.programs.presets import Preset, find_preset

PROG = "rlframe train"
DESCRIPTION = (
    "Train an agent on an environment. The defaults below are those of the agent and environment given, with their "
    "preset. Ctrl-C saves everything and exits with 130; --resume goes on."
)


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """What does not reach the numbers of a run."""

    preset: str = "auto"  # auto: the one that fits the agent and environment; none; or a name (`rlframe agents`)
    config: Union[str, None] = None  # repeat the run of this config.json; other options change it
    run_dir: Union[str, None] = None  # where everything is written; None: a new directory under runs/
    resume: bool = False  # go on with the run in --run-dir from its latest checkpoint
    resume_from: Union[int, None] = None  # with --resume: go on from this one of RUN_DIR/checkpoints, not the newest
    take_over: bool = False  # with --resume: end the process that still writes to --run-dir, and go on in its place
    listen: Union[int, None] = None  # distributed: the first of 3 ports at which `rlframe join` reaches this run
    # port of /status, /metrics, /healthz and a live page; 0: a free one; None: nowhere; auto: 0 for elastic, else None
    http: Union[Literal["auto"], int, None] = "auto"
    http_host: str = "127.0.0.1"  # address that these listen at
    token_file: Union[str, None] = None  # the token of these; None: one that is made, RUN_DIR/token
    stop_at: Union[int, None] = None  # environment steps at which to stop and save; schedules still end at --steps
    json: bool = False  # print the result as one JSON object, the last line of stdout
    quiet: bool = False  # show no progress
    profile: bool = False  # measure where the time goes and print it
    profile_trace: bool = False  # --profile, and a trace of JAX in RUN_DIR/trace
    wandb: bool = False  # log to Weights & Biases as well
    trackio: bool = False  # log to Trackio as well
    project: str = "rlframe"  # the project's name there
    traceback: bool = False  # show where an error came from


@dataclasses.dataclass(frozen=True)
class ExperimentOptions(Experiment):
    """An experiment whose configs are options of their own; `async` alone is a word that Python keeps for itself."""

    # act on the environments that answer first; not for agents that learn on-policy
    async_envs: Annotated[bool, tyro.conf.arg(name="async")] = False
    agent_config: Annotated[Any, tyro.conf.Suppress] = None
    network_config: Annotated[Any, tyro.conf.Suppress] = None


@dataclasses.dataclass(frozen=True)
class LanguageOptions(LanguageExperiment):
    """The same of a run in which a language model learns."""

    agent_config: Annotated[Any, tyro.conf.Suppress] = None


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit code."""
    described, session, preset = read_arguments(arguments)
    _set_title("train")
    _say(session, described, preset)
    from rlframe.cli.session import run_session

    return run_session(described, session, preset)


def read_arguments(arguments: list[str]) -> tuple[Any, SessionOptions, Preset | None]:
    """What the command line asks for, and the preset that it is based on.

    The options depend on the agent and network, and their defaults on the preset, so those few are
    looked for first.
    """
    defaults, preset = _defaults(arguments)
    options = _options(defaults)
    parsed: Any = parse(options, arguments, PROG, DESCRIPTION, default=_start(options, defaults))
    cls = _class_of(defaults)
    values = {field.name: getattr(parsed.experiment, field.name) for field in dataclasses.fields(cls)}
    configs: dict[str, Any] = {
        name: getattr(parsed, name, None) for name in ("agent_config", "network_config") if name in values
    }
    described = cls(**{**values, **configs})
    if parsed.session.resume and parsed.session.run_dir is None:
        raise UsageError("--resume needs --run-dir: the directory of the run to go on with.")
    return described, parsed.session, preset


def _class_of(described: Any) -> Any:
    return Experiment if isinstance(described, Experiment) else LanguageExperiment


def _defaults(arguments: list[str]) -> tuple[Any, Preset | None]:
    """What the command line changes: a saved experiment, or the defaults of the agent and environment named in it."""
    saved = _saved(arguments)
    agent, env = peek(arguments, "agent"), peek(arguments, "env")
    preset = None
    if saved is not None:
        if agent is not None and naming.absolute_name(agent) != saved.agent:
            raise UsageError(f"The config is of the agent {saved.agent!r}: --agent {agent} cannot replace it.")
        defaults = saved
    else:
        agent = agent or Experiment.agent
        env = env or experiment_class(agent).env
        preset = find_preset(peek(arguments, "preset") or "auto", agent, env)
        defaults = with_preset(preset, agent, env)
    network = peek(arguments, "network")
    if not isinstance(defaults, Experiment):
        return complete(defaults), preset
    if network is not None and network != defaults.network:
        defaults = dataclasses.replace(defaults, network=None if network == "None" else network, network_config=None)
    return complete(defaults), preset


def _saved(arguments: list[str]) -> Any:
    config, run_dir = peek(arguments, "config"), peek(arguments, "run-dir")
    if "--resume" not in arguments or run_dir is None:
        return load_experiment(config) if config is not None else None
    if config is not None:
        raise UsageError("--resume goes on with the run's own config.json: leave --config out.")
    if not (pathlib.Path(run_dir) / "config.json").is_file():
        raise UsageError(f"There is no run in {run_dir}: it has no config.json. Start it without --resume.")
    return load_experiment(run_dir)


def _options(defaults: Any) -> type:
    """What tyro parses: an experiment, a session, the agent's config without prefix, the network's with one."""
    flat: Any = tyro.conf.OmitArgPrefixes
    config_cls: Any = type(defaults.agent_config)
    fields: list[tuple[str, Any]] = [
        ("experiment", Annotated[_options_class(defaults), tyro.conf.arg(name=""), flat]),
        ("session", Annotated[SessionOptions, tyro.conf.arg(name=""), flat]),
        # Its own parts keep their prefixes.
        ("agent_config", Annotated[config_cls, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]),
    ]
    if getattr(defaults, "network_config", None) is not None:
        network_cls: Any = type(defaults.network_config)
        fields.append(("network_config", Annotated[network_cls, tyro.conf.arg(name="network")]))
    _check_no_clash(config_cls, defaults)
    return dataclasses.make_dataclass("Train", fields, frozen=True)


def _options_class(defaults: Any) -> Any:
    return ExperimentOptions if isinstance(defaults, Experiment) else LanguageOptions


def _start(options: Any, defaults: Any) -> Any:
    """The instance of `options` that holds the defaults."""
    plain = {field.name: getattr(defaults, field.name) for field in dataclasses.fields(_class_of(defaults))}
    plain.update({name: None for name in ("agent_config", "network_config") if name in plain})
    values = {"experiment": _options_class(defaults)(**plain), "session": SessionOptions()}
    values["agent_config"] = defaults.agent_config
    if getattr(defaults, "network_config", None) is not None:
        values["network_config"] = defaults.network_config
    return options(**values)


def _check_no_clash(config_cls: type, defaults: Any) -> None:
    agent = defaults.agent
    taken = {field.name for cls in (_class_of(defaults), SessionOptions) for field in dataclasses.fields(cls)}
    for field in dataclasses.fields(config_cls):
        if field.name in taken:
            raise UsageError(
                f"The config of {agent} has a field {field.name!r}, which is an option of `{PROG}` already: rename it."
            )


def _set_title(role: str) -> None:
    import setproctitle

    setproctitle.setproctitle(f"rlframe: {role}")


def _say(session: SessionOptions, described: Any, preset: Preset | None) -> None:
    """Prints what is about to run, and the preset's table."""
    if session.quiet:
        return
    if preset is None:
        return
    from rlframe.cli.tables import print_preset

    print_preset(preset, described, sys.stderr)
