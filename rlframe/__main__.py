"""Run the `rlframe` command with `python -m rlframe`."""

import sys

from rlframe.cli import main

sys.exit(main())
