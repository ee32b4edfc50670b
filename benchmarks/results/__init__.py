"""Learning results: train all runs of docs/project/results.md with the command line, and write it (`make results`)."""
