"""`rlframe serve trajectories` and `rlframe serve policy`."""

from __future__ import annotations

import dataclasses
import signal
from typing import Annotated, Any, Union

import tyro

from rlframe import extras, transport
from rlframe.cli.parsing import CommandOptions, parse
from rlframe.errors import UsageError, suggest
from rlframe.http.config import ServiceConfig
from rlframe.trajectories.config import Settings

# Services, with the sentence that the help has about each.
SERVICES = {
    "trajectories": "groups of sequences from environments, in batches for trainers",
    "policy": "a language model behind the OpenAI API, with its learner's newest weights",
}
_TRAJECTORIES = (
    "Serve trajectories: environments send groups of sequences over HTTP, trainers pull batches of them. "
    "The endpoints are described at /docs."
)
_POLICY = (
    "Serve a language model behind the OpenAI API (/v1/completions, /v1/chat/completions), with the newest weights of "
    "whoever learns it. The model is a folder in the published format (config.json, model.safetensors, "
    "tokenizer.json), or that of a run (--run-dir), whose newest checkpoint answers. With --learner its newer weights "
    "come from a learner that runs. The endpoints are described at /docs."
)


@dataclasses.dataclass(frozen=True)
class ServiceOptions(CommandOptions, ServiceConfig):
    """Options of both services, in the forms of the command line."""

    # answer other machines without a token: whoever reaches the service can do all that it offers
    no_token: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    # a name that the service is reached under, beside localhost and IP addresses; only without a token
    allowed_hosts: Annotated[tuple[str, ...], tyro.conf.arg(name="allowed-host"), tyro.conf.UseAppendAction] = ()


@dataclasses.dataclass(frozen=True)
class TrajectoryOptions(ServiceOptions, Settings):
    """Options of `rlframe serve trajectories`."""

    # clear the store: drop all registrations, environments and groups in it
    fresh: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False


@dataclasses.dataclass(frozen=True)
class PolicyOptions(ServiceOptions):
    """Options of `rlframe serve policy`."""

    model: Annotated[
        Union[str, None], tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL_FOLDER]", help="in the published format")
    ] = None
    run_dir: Union[str, None] = None  # directory of a run in place of a folder; its checkpoints are followed
    learner: Union[str, None] = None  # HOST:PORT of a learner's node (trust it), which newer weights come from
    tokenizer: Union[str, None] = None  # byte, or a folder with a tokenizer.json; none: the model's own, else byte
    port: int = 8001  # 0: one that is free
    model_name: str = "policy"  # that requests have to ask for
    dtype: Union[str, None] = None  # float32 or bfloat16; none: what the model's config.json says
    slots: int = 32  # answers that are decoded at once
    length: Union[int, None] = None  # tokens of a prompt and its answer; none: as many as the model takes
    steps: int = 8  # tokens that an answer gets between two chances of others to join
    max_waiting: int = 1024  # answers that wait for a slot; more are refused (429)
    request_timeout: float = 600.0  # seconds for an answer
    seed: int = 0  # of the requests that name none


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    if arguments and arguments[0] in SERVICES:
        serve = _serve_policy if arguments[0] == "policy" else _serve_trajectories
        serve(arguments[1:])
        return 0
    if arguments and arguments[0] in ("-h", "--help"):
        lines = [f"usage: rlframe serve {{{','.join(SERVICES)}}} [OPTIONS]", ""]
        print("\n".join([*lines, *(f"  {name:14} {what}" for name, what in SERVICES.items())]))
        return 0
    asked = f"{arguments[0]!r} is no service" if arguments else "Name a service"
    hint = suggest(arguments[0], SERVICES) if arguments else ""
    raise UsageError(f"{asked}; there are {', '.join(SERVICES)}.{hint}")


def _serve_trajectories(arguments: list[str]) -> None:
    prog = "rlframe serve trajectories"
    options = parse(TrajectoryOptions, arguments, prog, _TRAJECTORIES)
    if options.tokenizer not in (None, "byte"):
        extras.require("--tokenizer", "trajectories", "tokenizers")
    with extras.explain_import_error(prog, "trajectories"):
        from rlframe.trajectories.service.app import TrajectoryServer

    _run(TrajectoryServer(options))


def _serve_policy(arguments: list[str]) -> None:
    prog = "rlframe serve policy"
    options = parse(PolicyOptions, arguments, prog, _POLICY)
    if (options.model is None) == (options.run_dir is None):
        raise UsageError("Name the folder of a model, or a run by --run-dir: one of the two.")
    if options.run_dir is not None and options.dtype is not None:
        raise UsageError("--dtype is for a MODEL_FOLDER: a run's checkpoints have their own.")
    extras.require(prog, "trajectories", *(["lm"] if options.model is not None else []))
    if options.learner is not None:
        transport.DEFAULT.check("--learner")
    from rlframe.language.decoding import EngineConfig
    from rlframe.language.server import PolicyServer, PolicyServerConfig
    from rlframe.programs.policies.served import policy_of_folder, policy_of_run

    engine = EngineConfig(
        slots=options.slots, length=options.length, steps=options.steps, max_waiting=options.max_waiting
    )
    names = {field.name for field in dataclasses.fields(PolicyServerConfig)} & set(vars(options))
    cfg = PolicyServerConfig(**{name: getattr(options, name) for name in names}, engine=engine)
    if options.run_dir is not None:
        made = policy_of_run(options.run_dir, options.tokenizer, options.learner)
    else:
        assert options.model is not None
        made = policy_of_folder(options.model, options.tokenizer, options.learner, options.dtype)
    _run(PolicyServer(cfg, *made))


def _run(server: Any) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGTERM):  # having drained is a success
        signal.signal(number, lambda *_: server.stop())
    server.run()
