"""`python -m netacct`."""

import sys

from netacct.cli import main

sys.exit(main())
