"""Shared by our HTTP services: listening, stopping, tokens, refusals and metrics."""
