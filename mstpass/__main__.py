"""`python -m mstpass`: the command line."""

import sys

from mstpass.cli import main

sys.exit(main())
