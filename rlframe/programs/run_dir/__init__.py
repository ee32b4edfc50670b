"""The directory of a run: its files, the lock of its one writer, its status, and the HTTP service that shows it."""
