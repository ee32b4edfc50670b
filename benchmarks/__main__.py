"""Run `python -m benchmarks [NAME...]`; see `benchmarks.runner`."""

import sys

from benchmarks.runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
