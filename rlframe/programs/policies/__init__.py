"""Policies: what a run has learned, read from its checkpoints.

`saved.read_policy` reads the parameters of a checkpoint. With them

- `evaluation.Evaluations` plays episodes, during a run and after it (`rlframe.evaluate`), and `video.VideoRecorder` films them;
- `trained.TrainedPolicy` acts on single observations or batches (`rlframe.load`);
- `exported.export` writes a function for JAX without rlframe (`rlframe.export`);
- `served` gives a language model to the policy server (`rlframe serve policy --run-dir`).
"""
