"""Runs in which a language model learns: trajectory service, policy server, environments and learner as one program."""
