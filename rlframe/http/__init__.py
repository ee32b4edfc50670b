"""What the services that are reached over HTTP share: how they listen, end, and refuse."""
