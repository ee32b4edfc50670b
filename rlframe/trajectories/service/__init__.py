"""The service over HTTP. It checks groups, stores them in a log, queues them, and serves batches of them.

`app.py` makes the application, and `endpoints/` answers its requests. `service.py: Service` turns each change into a
command in the store's log, and `state_machine.py` applies the log to the queues. `wire.py` decodes groups,
`validation.py` checks them, `models.py` describes requests and answers, and shortens groups for the live page
(`page.html`). The docstring of `rlframe.trajectories` follows one group.
"""
