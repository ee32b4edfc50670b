"""Learning results: trains all runs of docs/results.md with the command line, and writes the page. `make results`."""
