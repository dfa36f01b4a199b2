"""`python -m convert`, as `paradec`."""

import sys

from paradec_jax.cli import main

sys.exit(main())
