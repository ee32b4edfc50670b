"""Watch and steer a run: an HTTP API, a page, and a client of it."""
