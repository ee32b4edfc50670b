"""Nodes that run beside Ray actors, on any machine of a Ray cluster."""
