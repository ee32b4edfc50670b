"""The directory of a run: who writes to it, what is in it, and how others read it while the run goes on.

A session takes the lock (`lock.RunLock`, the file `run.lock`), writes `config.json` and at last `result.json`
(`directory.RunDir`), and its state in between to `status.json` (`status.StatusFile`). `rlframe status` needs only the
directory: `status.StatusReader` reads that file and the newest rows, and asks the lock whether the writer is alive.
`control.serve_run_control` serves the same status over HTTP.
"""
