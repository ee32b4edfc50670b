"""Learning results: every run of docs/results.md, through the command line, and the page itself. `make results`."""
