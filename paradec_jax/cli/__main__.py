"""`python -m paradec_jax.cli`, as `paradec`."""

import sys

from paradec_jax.cli import main

sys.exit(main())
