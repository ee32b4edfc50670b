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

# maps each service to the description that the help shows
SERVICES = {
    "trajectories": "collect groups of sequences from environments, and return them to trainers in batches",
    "policy": "answer requests to the OpenAI API with a language model that follows the weights of a learner",
}
_TRAJECTORIES = (
    "Serve trajectories: environments send groups of sequences over HTTP, and trainers pull batches of them. "
    "See /docs for the endpoints."
)
_POLICY = (
    "Serve a language model behind the OpenAI API (/v1/completions, /v1/chat/completions). The model is either a "
    "folder in the format of Hugging Face (config.json, model.safetensors, tokenizer.json), or the model of a run "
    "(--run-dir) with its latest checkpoint. With --learner, the service also takes new weights from a running "
    "learner. See /docs for the endpoints."
)


@dataclasses.dataclass(frozen=True)
class ServiceOptions(CommandOptions, ServiceConfig):
    """Options that all services have."""

    # allow requests from other machines without a token: anybody who can reach the service has full access
    no_token: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    # host name of the service in clients' URLs; localhost and IP addresses always work; only needed without a token
    allowed_hosts: Annotated[tuple[str, ...], tyro.conf.arg(name="allowed-host"), tyro.conf.UseAppendAction] = ()


@dataclasses.dataclass(frozen=True)
class TrajectoryOptions(ServiceOptions, Settings):
    """Options of `rlframe serve trajectories`."""

    # clear the store at the start: delete all its registrations, environments and groups
    fresh: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False


@dataclasses.dataclass(frozen=True)
class PolicyOptions(ServiceOptions):
    """Options of `rlframe serve policy`."""

    model: Annotated[
        Union[str, None], tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL_FOLDER]", help="folder of the model")
    ] = None
    run_dir: Union[str, None] = None  # directory of a run to serve instead of MODEL_FOLDER; follows new checkpoints
    learner: Union[str, None] = None  # HOST:PORT of a learner node that provides new weights; it must be trusted
    # "byte", or a folder with a tokenizer.json; None means the model's tokenizer, or "byte" without one
    tokenizer: Union[str, None] = None
    port: int = 8001  # port of the service; 0 means a free port
    model_name: str = "policy"  # model name that requests must contain
    dtype: Union[str, None] = None  # float32 or bfloat16; None means the dtype in the model's config.json
    slots: int = 32  # maximum number of answers that are decoded at the same time
    length: Union[int, None] = None  # maximum tokens of a prompt and its answer; None means the model's limit
    steps: int = 8  # tokens decoded in one batch before waiting requests can join it
    max_waiting: int = 1024  # maximum number of requests that wait for a slot; more are refused (HTTP 429)
    request_timeout: float = 600.0  # seconds until an unanswered request fails
    seed: int = 0  # seed of requests without a seed


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    if arguments and arguments[0] in SERVICES:
        serve = _serve_policy if arguments[0] == "policy" else _serve_trajectories
        serve(arguments[1:])
        return 0
    if arguments and arguments[0] in ("-h", "--help"):
        lines = [f"usage: rlframe serve {{{','.join(SERVICES)}}} [OPTIONS]", ""]
        print("\n".join([*lines, *(f"  {name:14} {text}" for name, text in SERVICES.items())]))
        return 0
    problem = f"{arguments[0]!r} is not a service" if arguments else "Name a service"
    hint = suggest(arguments[0], SERVICES) if arguments else ""
    raise UsageError(f"{problem}; services are {', '.join(SERVICES)}.{hint}")


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
        raise UsageError("Name one model: give either MODEL_FOLDER or --run-dir.")
    if options.run_dir is not None and options.dtype is not None:
        raise UsageError("--dtype is only for a MODEL_FOLDER: the checkpoints of --run-dir have a fixed dtype.")
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
    for number in (signal.SIGINT, signal.SIGTERM):  # the server finishes its requests, then exits with code 0
        signal.signal(number, lambda *_: server.stop())
    server.run()
