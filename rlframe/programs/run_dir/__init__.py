"""The directory of a run: its lock, its files, and a status that other processes can read.

A session locks the directory (`lock.RunLock`, the file `run.lock`) and writes `config.json`. During the session, it
writes its state to `status.json` (`status.StatusFile`), and at the end `result.json` (`directory.RunDir`). `rlframe
status` needs only the directory: `status.StatusReader` reads `status.json` and the newest rows of metrics. It also
checks the lock, because a locked directory has a live writer. `status.serve_run_control` serves the status over HTTP.
"""
