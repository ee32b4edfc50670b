"""rlframe's side of the comparisons: scripts that run in separate processes."""
