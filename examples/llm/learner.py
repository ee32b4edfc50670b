"""The learner of a language model, for separately started services: `python examples/llm/learner.py`.

The first run starts with a supervised warm-up on the environment's demonstrations, and writes the weights to a folder.
Then the learner trains on batches of the trajectory service, and serves its newest weights at port 7000.
docs/learn/language-model.md shows the commands of all four terminals.
"""

import dataclasses
import pathlib
import uuid

import launchpad as lp
from reverse import Reverse

from rlframe import Learner, LearnerConfig, launch
from rlframe.agents import GRPO
from rlframe.language.model import weights
from rlframe.language.model.tokenizers import ByteTokenizer
from rlframe.language.warm_up import warm_up
from rlframe.metrics import CallbackLogger, JSONLLogger, MultiLogger
from rlframe.programs import make_experiment
from rlframe.trajectories import TrajectoryBuffer, TrajectoryClient

SERVICE, PORT = "http://localhost:8000", 7000
FOLDER = pathlib.Path("runs/by-hand")
STEPS = 500
BATCHES = 10 * STEPS  # more than the number of steps, because a killed learner needs some batches again

config = make_experiment("grpo", "reverse.py:Reverse", preset="grpo/reverse").agent_config


def make_weights(folder):
    env = Reverse(*Reverse.config_init())
    agent = GRPO(config)
    params = warm_up(agent, env.demonstrations, ByteTokenizer(), logger=CallbackLogger(show_warm_up), log_every=50)
    weights.save(folder, agent.model_config, params)
    print(f"The weights are in {folder}. Now start the policy server.", flush=True)


def show_warm_up(step, row):
    print(f"demonstrations, step {step} of {config.supervised_steps}: loss {row['supervised_loss']:.2f}", flush=True)


def show(step, row):
    if step % 10 == 0:
        print(f"step {step} of {STEPS}: reward {row['reward']:.2f}, staleness {row['staleness']:.1f}", flush=True)


def make_learner(agent):
    cfg = LearnerConfig(
        max_learner_steps=STEPS,
        checkpoint_dir=str(FOLDER / "checkpoints"),
        checkpoint_every=50,
        resume=True,
        log_every=1,
    )
    logger = MultiLogger([JSONLLogger(FOLDER / "metrics.jsonl"), CallbackLogger(show)])
    return Learner(cfg, agent, TrajectoryBuffer(SERVICE), logger)


def run_key():
    """Return a key that identifies the run in the service. A restarted learner has the same key, so it continues."""
    path = FOLDER / "run_key"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex)
    return path.read_text()


def main():
    sizes = {"batch_size": config.batch_size, "max_token_len": config.max_tokens}
    TrajectoryClient(SERVICE).register(**sizes, num_steps=BATCHES, run_key=run_key())
    if not (FOLDER / "weights/config.json").exists():
        make_weights(FOLDER / "weights")
    agent = GRPO(dataclasses.replace(config, weights=str(FOLDER / "weights")))
    program = lp.Program("learner")
    with program.group("learner"):
        program.add_node(lp.CourierNode(make_learner, agent))
    launch(program, ports={"learner": PORT})


if __name__ == "__main__":
    main()
