"""The service over HTTP: it checks groups, logs them in a store, queues them, and serves them in batches.

`app.py` makes the application, and `endpoints/` answers its requests. `service.py: Service` turns each change into a
command in the store's log, and `state_machine.py` applies the log to the queues. `wire.py` decodes groups,
`validation.py` checks them, `models.py` describes requests and answers, and `previews.py` shortens groups for the live
page (`page.html`). The docstring of `rlframe.trajectories` follows one group.
"""
