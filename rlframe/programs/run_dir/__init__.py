"""The directory of a run: its lock, its files, and its status for other processes.

A session locks the directory (`lock.RunLock`, the file `run.lock`) and writes `config.json`. During the session, it
writes its state to `status.json` (`status.StatusFile`), and at the end `result.json` (`directory.RunDir`). `rlframe
status` needs only the directory: `status.StatusReader` reads `status.json` and the newest rows of metrics, and checks
with the lock if the writer is alive. `control.serve_run_control` serves the same status over HTTP.
"""
