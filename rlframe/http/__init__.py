"""The common part of the services that are reached over HTTP: how they listen, end, and refuse."""
