"""rlframe's side of the comparisons: scripts that run in a process of their own."""
