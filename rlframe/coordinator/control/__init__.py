"""Watch and steer a run over HTTP: an API, a page, and a client of it.

`rlframe scale RUN_DIR collector 4`:

1. `address.py: read_control` reads the URL and the token's file from `RUN_DIR/control.json`.
2. `client.py: ControlClient.scale` posts `/scale`.
3. `endpoints.py` checks the body. `calls.py: CoordinatorCalls` calls `Coordinator.scale` in a thread, with a deadline.
4. The answer is `{"status": "ok"}`, or a refusal (`app.py`): `{"error": {"type", "message", "field"}}`.

`app.py` makes the application and serves it. A run without a coordinator is served by the same code: it can be watched
and stopped.
"""
