"""Policies: trained parameters from the checkpoints of a run.

`saved.read_checkpoint` reads a checkpoint, and `saved.read_policy` returns its parameters for acting. They are used by:

- `evaluation.Evaluations`, which plays episodes during a run and after it (`rlframe.evaluate`), and
  `video.VideoRecorder`, which records them
- `trained.TrainedPolicy`, which acts on single observations or batches (`rlframe.load`)
- `exported.export`, which writes a function for JAX without rlframe (`rlframe.export`)
- `saved.write_initial_checkpoint`, which starts a run from another run (`--init-from`)
- `served`, which passes a language model to the policy server (`rlframe serve policy --run-dir`)
"""
