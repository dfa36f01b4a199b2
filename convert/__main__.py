"""`python -m convert`."""

import signal
import sys

from .cli import main

# A command that SIGTERM ends clears away what it has half written.
signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
sys.exit(main())
