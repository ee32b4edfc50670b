"""`python -m rlframe` is the `rlframe` command."""

import sys

from rlframe.cli import main

sys.exit(main())
