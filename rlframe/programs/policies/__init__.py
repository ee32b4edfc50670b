"""Policies in the checkpoints of a run: evaluated, filmed, loaded, exported and served."""
