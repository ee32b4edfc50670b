"""The workers of a coordinator: learner, collectors and evaluator."""
