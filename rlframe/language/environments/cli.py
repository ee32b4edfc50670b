"""The command line of an environment, `python my_env.py serve|process|evaluate`, and its options.

Options are those of the class, then of a YAML file, then of the command line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import pathlib
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, Union

import pydantic
from pydantic import Field, SerializeAsAny
from pydantic.fields import FieldInfo

from rlframe import streams
from rlframe.errors import RlframeError, UsageError, suggest
from rlframe.language.environments import collecting
from rlframe.language.environments.config import (
    APIServerConfig,
    BaseEnvConfig,
    ServerBaseline,
    ServerManagerConfig,
    takes_bool,
)

if TYPE_CHECKING:
    from rlframe.language.environments.env import BaseEnv

COMMANDS = {
    "serve": "collect for the trainer of a trajectory service",
    "process": "write groups to a JSONL and an HTML file; needs a model server only",
    "evaluate": "evaluate once; needs a model server only",
}
_ENV, _SERVER, _CONFIG = "env", "openai", "config"
_HELP = {"-h", "--help"}

Model = TypeVar("Model", bound=pydantic.BaseModel)
Servers = Union[list[APIServerConfig], APIServerConfig, ServerBaseline]

logger = logging.getLogger("rlframe.language.environments")


class CommandConfig(ServerManagerConfig):
    """All options of a command; a subclass is that of one environment and command, by `config_cls`."""

    env_cls: ClassVar[type[BaseEnv]]
    command: ClassVar[str]

    port: int | None = Field(
        default=None, ge=1, lt=2**16, description="of a model server on this machine, in place of openai.base_url"
    )
    env: SerializeAsAny[BaseEnvConfig] = Field(default_factory=BaseEnvConfig)
    openai: Servers = Field(default_factory=ServerBaseline)

    def make(self) -> BaseEnv:
        """The environment that these options describe."""
        made = self.env_cls(self.env, self.openai, self.slurm, self.testing)
        made.server.max_n_completions = self.max_n_completions
        return made

    async def run(self) -> None:
        """Do what the command says."""
        env = self.make()
        commands = {
            "serve": env.env_manager,
            "process": env.process_manager,
            "evaluate": lambda: collecting.evaluate(env),
        }
        await commands[self.command]()


def config_cls(env_cls: type[BaseEnv], command: str) -> type[CommandConfig]:
    """The options of a command of an environment, whose defaults are the class's as suit the command."""
    env, servers = _defaults(env_cls, command)
    made: type[CommandConfig] = pydantic.create_model(
        f"{env_cls.__name__}{command.title()}Config",
        __base__=CommandConfig,
        env=(SerializeAsAny[type(env)], env),  # type: ignore[misc]
        openai=(Servers, servers),
    )
    made.env_cls, made.command = env_cls, command
    return made


def main(env_cls: type[BaseEnv], arguments: Sequence[str] | None = None) -> None:
    """Run a command, and end the process: 0 done, 1 it failed, 2 the input was wrong, 130 Ctrl-C, 143 SIGTERM."""
    sys.exit(run(env_cls, sys.argv[1:] if arguments is None else arguments))


def run(env_cls: type[BaseEnv], arguments: Sequence[str]) -> int:
    """Run a command as `main` does, and return the exit code."""
    streams.prepare()
    _log()
    try:
        return _dispatch(env_cls, arguments)
    except RlframeError as error:
        with contextlib.suppress(BrokenPipeError):
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        if streams.silence_broken_pipe(sys.stdout):  # `my_env.py serve --help | head`
            return 0
        raise
    except KeyboardInterrupt:  # before the signals were taken
        return 128 + signal.SIGINT
    finally:
        streams.flush()


def _dispatch(env_cls: type[BaseEnv], arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in _HELP:
        print(_commands(env_cls))
        return 0 if arguments else 2
    command = arguments[0]
    if command not in COMMANDS:
        raise UsageError(f"There is no command {command!r}: serve, process, evaluate.{suggest(command, COMMANDS)}")
    if _HELP & set(arguments):
        print(_usage(env_cls, command))
        return 0
    return asyncio.run(_until_signal(parse(env_cls, command, arguments[1:]).run))


def parse(env_cls: type[BaseEnv], command: str, arguments: Sequence[str]) -> CommandConfig:
    """The options of a command.

    Raises:
        UsageError: an option is unknown, or its value does not fit.
    """
    config = _config_cls(env_cls, command)
    defaults, servers = config(), config().openai
    given: dict[str, dict[str, Any]] = {space: {} for space in ("", _ENV, _SERVER)}
    for name, value in _given(arguments, _fields(defaults)).items():
        space, _, field = name.rpartition(".")
        given[space][field] = value
    if (port := given[""].get("port")) is not None:
        if "base_url" in given[_SERVER]:
            raise UsageError("--port and --openai.base_url both say where the model server is: give one of them.")
        given[_SERVER]["base_url"] = f"http://localhost:{port}/v1"
    file = {name: told for name, told in read_yaml(given[""].pop(_CONFIG, None)).items() if told is not None}
    env = made(defaults.env, file.pop(_ENV, {}), given[_ENV], f"{_ENV}.")
    servers = _made_servers(servers, _server(servers), file.pop(_SERVER, None), given[_SERVER])
    return made(defaults, file, {**given[""], _ENV: env, _SERVER: servers}, "")


def _config_cls(env_cls: type[BaseEnv], command: str) -> type[CommandConfig]:
    """The options of a command, as the environment has them."""
    return getattr(env_cls, f"get_cli_{command}_config_cls")()


async def _until_signal(start: Any) -> int:
    """Run to the end, or until Ctrl-C or SIGTERM; then what was opened is closed all the same."""
    work: Coroutine[Any, Any, None] = start()
    task = asyncio.ensure_future(work)
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        if len(received) > 1:  # asked twice: at once
            os._exit(128 + number)
        logger.info("Ends on %s.", signal.Signals(number).name)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # not on Windows
            loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]
    return 0


def _commands(env_cls: type[BaseEnv]) -> str:
    lines = [f"{env_cls.__name__}: {', '.join(COMMANDS)}", ""]
    lines += [f"  {name:<9} {what}" for name, what in COMMANDS.items()]
    lines += ["", "options of serve (COMMAND --help lists those of another command):", *_options(env_cls, "serve")]
    return "\n".join(lines)


def _usage(env_cls: type[BaseEnv], command: str) -> str:
    lines = [f"{env_cls.__name__} {command}: {COMMANDS[command]}", "", "options:", *_options(env_cls, command)]
    return "\n".join(lines)


def _options(env_cls: type[BaseEnv], command: str) -> list[str]:
    lines = ["  --config FILE.yaml", "      options from a file; those given here go first"]
    for name, (field, default) in _fields(_config_cls(env_cls, command)()).items():
        shown = getattr(default, "value", default)
        lines.append(f"  --{name} {'' if shown is None else shown}".rstrip())
        lines += [f"      {field.description}"] if field.description else []
    return lines


def _defaults(env_cls: type[BaseEnv], command: str) -> tuple[BaseEnvConfig, Servers]:
    """The environment's options and the model servers: those of the class, as suits the command."""
    env, servers = env_cls.config_init()
    update: dict[str, Any] = {}
    if env.wandb_name is None and env_cls.name is not None:
        update["wandb_name"] = env_cls.name
    if command != "serve":
        update["use_wandb"] = False
    if command == "process":
        update |= {"ensure_scores_are_not_same": False, "include_messages": True}
        if env.data_path_to_save_groups is None:
            update["data_path_to_save_groups"] = f"data/{env_cls.name or 'groups'}.jsonl"
    return env.model_copy(update=update), servers


def _server(servers: Servers) -> APIServerConfig:
    """What flags of one model server change: that of the class, where it has one."""
    server = servers if isinstance(servers, ServerBaseline) else servers[0] if len(servers) == 1 else ServerBaseline()
    return server if isinstance(server, APIServerConfig) else APIServerConfig(**server.model_dump())


def _fields(defaults: CommandConfig) -> dict[str, tuple[FieldInfo, Any]]:
    """Map each flag, without its dashes, to its field and default."""
    models = {_ENV: defaults.env, _SERVER: _server(defaults.openai), "": defaults}
    return {
        f"{space}.{name}".removeprefix("."): (field, getattr(model, name))
        for space, model in models.items()
        for name, field in type(model).model_fields.items()
        if space or name not in (_ENV, _SERVER)
    }


def _made_servers(servers: Servers, default: APIServerConfig, of_file: Any, given: dict[str, Any]) -> Servers:
    """Return the class's servers, unless the file says others, or the command line another one."""
    listed = of_file if isinstance(of_file, list) else [of_file]
    several = len(listed) > 1
    if given and (several or (of_file is None and isinstance(servers, list) and len(servers) > 1)):
        raise UsageError(f"--{_SERVER}.* is for one model server, and there are several: name them in a YAML file.")
    if several:
        return [made(APIServerConfig(), one, {}, f"{_SERVER}.") for one in listed]
    told = listed[0] if listed else None
    return [made(default, told or {}, given, f"{_SERVER}.")] if told or given else servers


def _given(arguments: Sequence[str], fields: Mapping[str, tuple[FieldInfo, Any]]) -> dict[str, Any]:
    """The flags of a command line, as values of their fields."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    known = [f"--{name}" for name in (*fields, _CONFIG)]
    for flag in known:
        parser.add_argument(*{flag, flag.replace("_", "-")}, dest=flag[2:], nargs="*")
    words, unknown = parser.parse_known_args(arguments)
    if unknown and not unknown[0].startswith("--"):
        raise UsageError(f"{unknown[0]!r} is no option: options begin with `--`.")
    if unknown:
        name = unknown[0].partition("=")[0].replace("-", "_").replace("__", "--", 1)
        raise UsageError(f"There is no option {name}.{suggest(name, known) or ' See --help.'}")
    given = vars(words)
    if len(given.get(_CONFIG, ("",))) != 1:
        raise UsageError("--config is the path of one YAML file.")
    return {
        name: values[0] if name == _CONFIG else _value(name, fields[name][0], values) for name, values in given.items()
    }


def read_yaml(path: str | None) -> dict[str, Any]:
    """The options of a file: `env`, `openai` (one server or a list), and those of the command line's top level."""
    if path is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(pathlib.Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"The config file {path} cannot be read: {error}") from error
    if not isinstance(content, Mapping):
        raise UsageError(f"The config file {path} is to hold names and values; got {type(content).__name__}.")
    known = tuple(CommandConfig.model_fields)
    for name in content:
        if name not in known:
            raise UsageError(f"The config file {path} has no use for {name!r}.{suggest(str(name), known)}")
    return dict(content)


def made(default: Model, of_file: Any, given: Mapping[str, Any], prefix: str) -> Model:
    """The default with what a file and the command line say, checked.

    Raises:
        UsageError: a name is unknown, or a value does not fit; options begin with `--` and `prefix`.
    """
    if not isinstance(of_file, Mapping):
        raise UsageError(f"{prefix.rstrip('.')} is to hold names and values; got {of_file!r}.")
    values = {name: getattr(default, name) for name in type(default).model_fields}
    try:
        return type(default)(**{**values, **of_file, **given})
    except pydantic.ValidationError as error:
        raise UsageError("; ".join(_sentence(one, prefix) for one in error.errors())) from None


def _sentence(error: Any, prefix: str) -> str:
    where, message = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
    return f"--{prefix}{where}: {message}; got {error['input']!r}." if where else message


def _value(name: str, field: FieldInfo, values: list[str]) -> Any:
    """Parse the words after a flag as its field's value: none is true where it can be, several are a list."""
    import yaml

    annotation: Any = field.annotation
    if not values:
        if takes_bool(annotation):
            return True
        raise UsageError(f"--{name} needs a value" + (f" ({field.description})." if field.description else "."))
    if values == ["None"]:
        return None
    adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(annotation)
    candidates: list[Any] = [values]
    if len(values) == 1:
        candidates.insert(0, values[0])
        with contextlib.suppress(yaml.YAMLError):
            candidates.insert(1, yaml.safe_load(values[0] or "''"))
    for candidate in candidates:
        with contextlib.suppress(pydantic.ValidationError):
            adapter.validate_python(candidate)
            if not isinstance(candidate, bool) or takes_bool(annotation):
                return candidate
    if len(values) > 1:
        raise UsageError(f"--{name} does not take {len(values)} values; got {' '.join(values)}.")
    return values[0]  # and let the whole config say what is wrong


def _log() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    for chatty in ("httpx", "httpx2", "httpcore", "openai"):  # a line for each request
        logging.getLogger(chatty).setLevel(logging.WARNING)
