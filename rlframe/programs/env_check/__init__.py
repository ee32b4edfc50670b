"""Check a user's environment: `rlframe.check_env` and `rlframe check-env`.

- `check.py: check_env` runs the checks in order, and stops at the first error that prevents the others.
- `copies.py` opens copies of the environment, and steps them with random actions.
- `episodes.py` compares steps with the spaces, and the episodes of two copies with each other.
- `speed.py` measures the time of steps, the growth of memory, and the speed of other pools. It recommends a pool,
  an agent and a training command.
- `report.py` has the results: problems, measurements, recommendation.
"""
