"""The service over HTTP: groups are checked, logged in a store, queued, and answered for in batches."""
