"""Training: the loop of a single process, the monitors of other programs, and the rows that both write."""
