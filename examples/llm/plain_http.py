"""A trainer and a rollout handler with plain HTTP requests, without the package rlframe.

rlframe serve trajectories &
python examples/llm/plain_http.py
"""

import json
import sys
import threading
import time
import urllib.request

BATCH_SIZE, STEPS = 4, 3


def call(service, method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(service + path, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def trainer(service):
    settings = {"wandb_group": "group", "wandb_project": "project", "batch_size": BATCH_SIZE, "max_token_len": 512}
    settings |= {"checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": STEPS}
    call(service, "POST", "/register", settings)
    for step in range(STEPS):
        while (batch := call(service, "GET", "/batch")["batch"]) is None:
            time.sleep(0.1)
        scores = [score for group in batch for score in group["scores"]]  # learn from batch here
        print(f"step {step}: {len(scores)} sequences, mean score {sum(scores) / len(scores):.2f}", flush=True)


def handler(service, is_over):
    registration = {"max_token_length": 512, "desired_name": "counting", "weight": 1.0}
    while (env := call(service, "POST", "/register-env", registration))["status"] != "success":
        time.sleep(0.1)  # the service refuses environments until the trainer has requested its first batch
    logs = call(service, "GET", "/wandb_info")  # wandb.init(**logs, name=env["wandb_name"]) here
    print(f"{env['wandb_name']} logs to group {logs['group']!r} of project {logs['project']!r}", file=sys.stderr)
    while not is_over():
        status = call(service, "GET", "/status-env", {"env_id": env["env_id"]})
        if status["queue_size"] > 3 * BATCH_SIZE:  # the queue is long enough; wait
            time.sleep(0.1)
            continue
        tokens = [[1, 2, 3], [1, 2, 4]]  # two answers to one prompt; the masks hide the prompt tokens
        group = {"tokens": tokens, "masks": [[-100, -100, row[2]] for row in tokens], "scores": [1.0, 0.0]}
        call(service, "POST", "/scored_data", {**group, "env_id": env["env_id"]})
    call(service, "POST", "/disconnect-env", {"env_id": env["env_id"]})


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    training = threading.Thread(target=trainer, args=[url])
    training.start()
    handler(url, lambda: not training.is_alive())
    training.join()
