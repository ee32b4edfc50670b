"""The options of an environment: of its class, then of a YAML file, then of the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import pydantic
from pydantic.fields import FieldInfo

from rlframe.errors import UsageError, suggest
from rlframe.language.environments.config import BaseEnvConfig
from rlframe.language.environments.servers import APIServerConfig, ServerBaseline, ServerManagerConfig

_ENV, _SERVER = "env", "openai"
_CONFIG = "config"

Model = TypeVar("Model", bound=pydantic.BaseModel)
Servers = TypeVar("Servers", bound=ServerBaseline)


@dataclasses.dataclass
class Options:
    """What an environment is made with."""

    env: BaseEnvConfig
    servers: ServerBaseline | list[APIServerConfig]
    manager: ServerManagerConfig


class Flags(Generic[Servers]):
    """What may be given, with its defaults.

    Args:
        env: gives the fields and defaults of `--env.NAME`.
        servers: the model servers; `--openai.NAME` is for one server.
    """

    def __init__(self, env: BaseEnvConfig, servers: ServerBaseline | Sequence[Servers]) -> None:
        self._env, self._servers = env, servers
        listed = [servers] if isinstance(servers, ServerBaseline) else list(servers)
        first = listed[0] if len(listed) == 1 else None
        self._server = first if isinstance(first, APIServerConfig) else _api(first)
        self._several = len(listed) > 1
        self._manager = ServerManagerConfig()

    @property
    def fields(self) -> dict[str, tuple[FieldInfo, Any]]:
        """Of each flag without its dashes: the field, and its default."""
        found = {}
        for prefix, model in ((f"{_ENV}.", self._env), (f"{_SERVER}.", self._server), ("", self._manager)):
            for name, field in type(model).model_fields.items():
                found[prefix + name] = field, getattr(model, name)
        return found

    def options(self, arguments: Sequence[str]) -> Options:
        """From the command line.

        Raises:
            UsageError: an option is unknown, or its value does not fit.
        """
        given = self._given(arguments)
        file = {name: told for name, told in read_yaml(given.pop(_CONFIG, None)).items() if told is not None}
        told: dict[str, dict[str, Any]] = {_ENV: {}, _SERVER: {}, "": {}}
        for name, value in given.items():
            space, _, field = name.rpartition(".")
            told[space][field] = value
        env = made(self._env, file.pop(_ENV, {}), told[_ENV], f"{_ENV}.")
        servers = self._made_servers(file.pop(_SERVER, None), told[_SERVER])
        return Options(env, servers, made(self._manager, file, told[""], ""))

    def _made_servers(self, of_file: Any, given: dict[str, Any]) -> ServerBaseline | list[APIServerConfig]:
        several = isinstance(of_file, list) and len(of_file) > 1
        if given and (several or (self._several and of_file is None)):
            raise UsageError(f"--{_SERVER}.* is for one model server, and there are several: name them in a YAML file.")
        if several:
            return [made(APIServerConfig(), one, {}, f"{_SERVER}.") for one in of_file]
        told = of_file[0] if isinstance(of_file, list) else of_file
        if not told and not given:
            return self._servers if isinstance(self._servers, ServerBaseline) else list(self._servers)  # type: ignore
        return [made(self._server, told or {}, given, f"{_SERVER}.")]

    def _given(self, arguments: Sequence[str]) -> dict[str, Any]:
        """The flags of a command line, as values of their fields."""
        fields, given = self.fields, {}
        left = list(arguments)
        while left:
            argument = left.pop(0)
            if not argument.startswith("--"):
                raise UsageError(f"{argument!r} is no option: options begin with `--`.")
            name, joined, value = argument[2:].partition("=")
            name = name.replace("-", "_")
            values = [value] if joined else []
            while not joined and left and not left[0].startswith("--"):
                values.append(left.pop(0))
            if name == _CONFIG:
                if len(values) != 1:
                    raise UsageError("--config is the path of one YAML file.")
                given[name] = values[0]
            elif name in fields:
                given[name] = _value(name, fields[name][0], values)
            else:
                raise UsageError(f"There is no option --{name}.{_suggested(name, [*fields, _CONFIG])}")
        return given


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
    known = (_ENV, _SERVER, *ServerManagerConfig.model_fields)
    for name in content:
        if name not in known:
            raise UsageError(f"The config file {path} has no use for {name!r}.{suggest(str(name), known)}")
    return dict(content)


def help_text(flags: Flags[Any]) -> str:
    """Each option with its default, and what it is for."""
    lines = ["  --config FILE.yaml", "      options from a file; those given here go first"]
    for name, (field, default) in flags.fields.items():
        shown = getattr(default, "value", default)
        lines += [f"  --{name} {'' if shown is None else shown}".rstrip(), f"      {field.description or ''}".rstrip()]
    return "\n".join(line for line in lines if line)


def _api(baseline: ServerBaseline | None) -> APIServerConfig:
    return APIServerConfig(**({} if baseline is None else baseline.model_dump()))


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
    """What the words after a flag mean for its field: none is true, several are a list."""
    import yaml

    if not values:
        return True
    if values == ["None"]:
        return None
    annotation: Any = field.annotation
    adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(annotation)
    candidates: list[Any] = [values]
    if len(values) == 1:
        candidates.insert(0, values[0])
        with contextlib.suppress(yaml.YAMLError):
            candidates.insert(1, yaml.safe_load(values[0]))
    for candidate in candidates:
        with contextlib.suppress(pydantic.ValidationError):
            adapter.validate_python(candidate)
            return candidate
    if len(values) > 1:
        raise UsageError(f"--{name} does not take {len(values)} values; got {' '.join(values)}.")
    return values[0]  # and let the whole config say what is wrong


def _suggested(name: str, known: Sequence[str]) -> str:
    near = suggest(name, known)
    return near.replace("Did you mean '", "Did you mean '--") if near else " See --help."
