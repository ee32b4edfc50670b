"""The clients of the service: for environments, for trainers, and the buffer that a Learner samples from."""
