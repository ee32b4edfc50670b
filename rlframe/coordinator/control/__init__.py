"""How a run under a coordinator is watched and steered: an HTTP API, a page, and a client of it."""
