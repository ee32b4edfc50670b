"""Policies: trained parameters from the checkpoints of a run.

`saved.read_policy` reads the parameters of a checkpoint. These parts use the parameters:

- `evaluation.Evaluations`, which plays episodes during a run and after it (`rlframe.evaluate`), and
  `video.VideoRecorder`, which records them
- `trained.TrainedPolicy`, which acts on single observations or batches (`rlframe.load`)
- `exported.export`, which writes a function for JAX without rlframe (`rlframe.export`)
- `served`, which passes a language model to the policy server (`rlframe serve policy --run-dir`)
"""
