"""The service over HTTP: groups are checked, logged in a store, queued, and answered for in batches.

`app.py` makes the application, whose requests are answered in `endpoints/`. `service.py: Service` turns each change
into a command of the store's log, and `state_machine.py` applies the log to the queues. `wire.py` decodes groups,
`validation.py` checks them, `models.py` describes bodies, and `previews.py` shortens groups for the live page
(`page.html`). The docstring of `rlframe.trajectories` follows one group.
"""
