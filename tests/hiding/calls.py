"""Load the core package once, then run commands in forks of this process. Each extra has another set of hidden modules.

Read {extra: {"hidden": [...], "calls": [[...], ...]}} as JSON from stdin. Print {extra: [[exit code, stderr], ...]}. A
call `["import", MODULE, NAME...]` imports the module and gets these names from the module.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import tempfile
from typing import Any


def main() -> None:
    # Load the core package. In this process, the modules of all extras are hidden.
    import rlframe.cli.main
    import rlframe.cli.train
    import rlframe.cli.train_options
    import rlframe.programs.topologies.elastic_nodes

    del rlframe
    results = {name: _in_fork(each["hidden"], each["calls"]) for name, each in json.load(sys.stdin).items()}
    print(json.dumps(results))


def _in_fork(hidden: list[str], calls: list[list[str]]) -> list[Any]:
    with tempfile.TemporaryFile("w+") as file:
        child = os.fork()
        if not child:
            code = 1
            try:
                import sitecustomize

                sitecustomize.HIDDEN.clear()
                sitecustomize.HIDDEN.update(hidden)
                json.dump([_call(call) for call in calls], file)
                file.flush()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        file.seek(0)
        return json.load(file)


def _call(arguments: list[str]) -> tuple[int, str]:
    from rlframe.cli.main import main
    from rlframe.errors import UsageError

    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        if arguments[0] != "import":
            return main(arguments), stderr.getvalue()
        try:
            module = importlib.import_module(arguments[1])
            for name in arguments[2:]:
                getattr(module, name)
        except UsageError as error:
            return error.exit_code, f"rlframe: {error}\n"  # the command line prints this text
        except Exception as error:
            return 1, f"{type(error).__name__}: {error}"
    return 0, ""


if __name__ == "__main__":
    main()
