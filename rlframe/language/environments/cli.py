"""Command line of an environment: `python my_env.py serve|process|evaluate`.

The command line overrides the options of a YAML file. The YAML file overrides the defaults of the environment's class.
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
from collections.abc import Mapping, Sequence
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
    "serve": "collect groups for the trainer of a trajectory service",
    "process": "write groups to a JSONL and an HTML file; needs only a model server",
    "evaluate": "evaluate once; needs only a model server",
}
_ENV, _SERVER, _CONFIG = "env", "openai", "config"
_HELP = {"-h", "--help"}

Model = TypeVar("Model", bound=pydantic.BaseModel)
Servers = Union[list[APIServerConfig], APIServerConfig, ServerBaseline]

logger = logging.getLogger("rlframe.language.environments")


class CommandConfig(ServerManagerConfig):
    """All options of a command. `config_cls` makes a subclass for each pair of an environment and a command."""

    env_cls: ClassVar[type[BaseEnv]]
    command: ClassVar[str]

    port: int | None = Field(
        default=None, ge=1, lt=2**16, description="port of a model server on this machine, instead of openai.base_url"
    )
    env: SerializeAsAny[BaseEnvConfig] = Field(default_factory=BaseEnvConfig)
    openai: Servers = Field(default_factory=ServerBaseline)

    def make_env(self) -> BaseEnv:
        """Make the environment with these options."""
        env = self.env_cls(self.env, self.openai, self.slurm, self.testing)
        env.server.max_n_completions = self.max_n_completions
        return env

    async def run(self) -> None:
        """Run the command."""
        env = self.make_env()
        commands = {
            "serve": env.env_manager,
            "process": env.process_manager,
            "evaluate": lambda: collecting.evaluate(env),
        }
        await commands[self.command]()


def config_cls(env_cls: type[BaseEnv], command: str) -> type[CommandConfig]:
    """Make the class of a command's options. Its defaults come from the environment class, adapted to the command."""
    env, servers = _defaults(env_cls, command)
    cls: type[CommandConfig] = pydantic.create_model(
        f"{env_cls.__name__}{command.title()}Config",
        __base__=CommandConfig,
        env=(SerializeAsAny[type(env)], env),  # type: ignore[misc]
        openai=(Servers, servers),
    )
    cls.env_cls, cls.command = env_cls, command
    return cls


def main(env_cls: type[BaseEnv], arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit. Exit codes: 0 success, 1 failure, 2 invalid input, 130 Ctrl-C, 143 SIGTERM."""
    sys.exit(run(env_cls, sys.argv[1:] if arguments is None else arguments))


def run(env_cls: type[BaseEnv], arguments: Sequence[str]) -> int:
    """Run a command. Return the exit code; see `main`."""
    streams.prepare()
    _configure_logging()
    try:
        return _dispatch(env_cls, arguments)
    except RlframeError as error:
        with contextlib.suppress(BrokenPipeError):
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        if streams.silence_broken_pipe(sys.stdout):  # such as in `my_env.py serve --help | head`
            return 0
        raise
    except KeyboardInterrupt:  # Ctrl-C came before the signal handlers were installed
        return 128 + signal.SIGINT
    finally:
        streams.flush()


def _dispatch(env_cls: type[BaseEnv], arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in _HELP:
        print(_commands(env_cls))
        return 0 if arguments else 2
    command = arguments[0]
    if command not in COMMANDS:
        raise UsageError(
            f"There is no command {command!r}. Commands: serve, process, evaluate.{suggest(command, COMMANDS)}"
        )
    if _HELP & set(arguments):
        print(_usage(env_cls, command))
        return 0
    return asyncio.run(_run_until_signal(parse(env_cls, command, arguments[1:])))


def parse(env_cls: type[BaseEnv], command: str, arguments: Sequence[str]) -> CommandConfig:
    """Parse the options of a command.

    Raises:
        UsageError: An option is unknown, or a value is invalid.
    """
    defaults = _config_cls(env_cls, command)()
    given: dict[str, dict[str, Any]] = {space: {} for space in ("", _ENV, _SERVER)}
    for name, value in _parse_flags(arguments, _flags(defaults)).items():
        space, _, field = name.rpartition(".")
        given[space][field] = value
    if (port := given[""].get("port")) is not None:
        if "base_url" in given[_SERVER]:
            raise UsageError(
                "--port and --openai.base_url both set the address of the model server. Give only one of them."
            )
        given[_SERVER]["base_url"] = f"http://localhost:{port}/v1"
    file = {name: value for name, value in read_yaml(given[""].pop(_CONFIG, None)).items() if value is not None}
    env = override(defaults.env, file.pop(_ENV, {}), given[_ENV], f"{_ENV}.")
    servers = _override_servers(defaults.openai, file.pop(_SERVER, None), given[_SERVER])
    return override(defaults, file, {**given[""], _ENV: env, _SERVER: servers}, "")


def _config_cls(env_cls: type[BaseEnv], command: str) -> type[CommandConfig]:
    """Return the class of a command's options. A subclass of `BaseEnv` can override the method that returns it."""
    return getattr(env_cls, f"get_cli_{command}_config_cls")()


async def _run_until_signal(config: CommandConfig) -> int:
    """Run until the command ends, or until Ctrl-C or SIGTERM cancels it. Return the exit code."""
    task = asyncio.ensure_future(config.run())
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        if len(received) > 1:  # a second signal ends the process at once
            os._exit(128 + number)
        logger.info("Ending on %s.", signal.Signals(number).name)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # on Windows
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
    lines += [f"  {name:<9} {help_text}" for name, help_text in COMMANDS.items()]
    lines += [
        "",
        "options of serve (COMMAND --help lists the options of another command):",
        *_options(env_cls, "serve"),
    ]
    return "\n".join(lines)


def _usage(env_cls: type[BaseEnv], command: str) -> str:
    lines = [f"{env_cls.__name__} {command}: {COMMANDS[command]}", "", "options:", *_options(env_cls, command)]
    return "\n".join(lines)


def _options(env_cls: type[BaseEnv], command: str) -> list[str]:
    lines = ["  --config FILE.yaml", "      file with options; options on the command line override it"]
    for name, (field, default) in _flags(_config_cls(env_cls, command)()).items():
        shown = getattr(default, "value", default)
        lines.append(f"  --{name} {'' if shown is None else shown}".rstrip())
        lines += [f"      {field.description}"] if field.description else []
    return lines


def _defaults(env_cls: type[BaseEnv], command: str) -> tuple[BaseEnvConfig, Servers]:
    """Return (the environment class's default options, adapted to the command; its default model servers)."""
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


def _single_server(servers: Servers) -> APIServerConfig:
    """Return the config that the --openai.* flags change: the class's only server; the defaults if it has several."""
    server = servers if isinstance(servers, ServerBaseline) else servers[0] if len(servers) == 1 else ServerBaseline()
    return server if isinstance(server, APIServerConfig) else APIServerConfig(**server.model_dump())


def _flags(defaults: CommandConfig) -> dict[str, tuple[FieldInfo, Any]]:
    """Return a dict: name of a flag without its dashes -> (the flag's field, its default value)."""
    models = {_ENV: defaults.env, _SERVER: _single_server(defaults.openai), "": defaults}
    return {
        f"{space}.{name}".removeprefix("."): (field, getattr(model, name))
        for space, model in models.items()
        for name, field in type(model).model_fields.items()
        if space or name not in (_ENV, _SERVER)
    }


def _override_servers(servers: Servers, file_values: Any, given: dict[str, Any]) -> Servers:
    """Return the model servers of the command line or the file; by default, the servers of the environment class."""
    listed = file_values if isinstance(file_values, list) else [file_values]
    several = len(listed) > 1
    if given and (several or (file_values is None and isinstance(servers, list) and len(servers) > 1)):
        raise UsageError(f"--{_SERVER}.* applies to one model server, but there are several. Use a YAML file.")
    if several:
        return [override(APIServerConfig(), one, {}, f"{_SERVER}.") for one in listed]
    entry = listed[0] if listed else None
    return [override(_single_server(servers), entry or {}, given, f"{_SERVER}.")] if entry or given else servers


def _parse_flags(arguments: Sequence[str], fields: Mapping[str, tuple[FieldInfo, Any]]) -> dict[str, Any]:
    """Parse the flags of a command line. Return a dict: name of the flag -> value of its field's type."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    known = [f"--{name}" for name in (*fields, _CONFIG)]
    for flag in known:
        parser.add_argument(*{flag, flag.replace("_", "-")}, dest=flag[2:], nargs="*")
    words, unknown = parser.parse_known_args(arguments)
    if unknown and not unknown[0].startswith("--"):
        raise UsageError(f"{unknown[0]!r} is not an option. Options begin with `--`.")
    if unknown:
        name = unknown[0].partition("=")[0].replace("-", "_").replace("__", "--", 1)
        raise UsageError(f"There is no option {name}.{suggest(name, known) or ' See --help.'}")
    given = vars(words)
    if len(given.get(_CONFIG, ("",))) != 1:
        raise UsageError("--config needs the path of exactly one YAML file.")
    return {
        name: values[0] if name == _CONFIG else _parse_value(name, fields[name][0], values)
        for name, values in given.items()
    }


def read_yaml(path: str | None) -> dict[str, Any]:
    """Read the options of a YAML file: `env`, `openai` (one server or a list), and other fields of `CommandConfig`."""
    if path is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(pathlib.Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"The config file {path} cannot be read: {error}") from error
    if not isinstance(content, Mapping):
        raise UsageError(
            f"The config file {path} must contain a mapping of option names to values; got {type(content).__name__}."
        )
    known = tuple(CommandConfig.model_fields)
    for name in content:
        if name not in known:
            raise UsageError(f"The config file {path} has an unknown option {name!r}.{suggest(str(name), known)}")
    return dict(content)


def override(default: Model, file_values: Any, given: Mapping[str, Any], prefix: str) -> Model:
    """Return a validated copy of `default`, with the values of the file, and then those of the command line.

    Raises:
        UsageError: A name is unknown, or a value is invalid. The message names the option as `--`, `prefix` and name.
    """
    if not isinstance(file_values, Mapping):
        raise UsageError(f"{prefix.rstrip('.')} must be a mapping of option names to values; got {file_values!r}.")
    values = {name: getattr(default, name) for name in type(default).model_fields}
    try:
        return type(default)(**{**values, **file_values, **given})
    except pydantic.ValidationError as error:
        raise UsageError("; ".join(_describe(one, prefix) for one in error.errors())) from None


def _describe(error: Any, prefix: str) -> str:
    where, message = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
    return f"--{prefix}{where}: {message}; got {error['input']!r}." if where else message


def _parse_value(name: str, field: FieldInfo, values: list[str]) -> Any:
    """Parse the words after a flag. A bool flag without words is true. Several words are a list."""
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
    return values[0]  # an invalid value raises an error later, when the whole config is validated


def _configure_logging() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    for name in ("httpx", "httpx2", "httpcore", "openai"):  # these libraries log a line for each request
        logging.getLogger(name).setLevel(logging.WARNING)
