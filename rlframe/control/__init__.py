"""Monitor and control a run over HTTP: an API, a web page, and a client.

Example: `rlframe scale RUN_DIR collector 4`.

1. `address.py: read_control` reads the URL and the path of the token file from `RUN_DIR/control.json`.
2. `client.py: ControlClient.scale` posts `/scale`.
3. `endpoints.py` checks the body. `calls.py: CoordinatorCalls` calls `Coordinator.scale` in a thread, with a deadline.
4. The response is `{"status": "ok"}`, or an error from `app.py`: `{"error": {"type", "message", "field"}}`.

`app.py` creates the application and serves it. Only the topology `elastic` has a coordinator. The API of other runs can
only show the status and stop the run: `programs/run_dir/status.py: serve_run_control` starts it.
"""
