"""Processes of one machine: shared memory, locks, heartbeats, and ending when the parent dies."""
