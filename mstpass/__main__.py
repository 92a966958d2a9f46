"""`python -m mstpass`: the command line."""

import sys

from mstpass.cli.main import main

sys.exit(main())
