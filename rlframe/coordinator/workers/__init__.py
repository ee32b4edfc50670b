"""What a coordinator's workers are: the learner, the collectors, the evaluator, and the process of one."""
