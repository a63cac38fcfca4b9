"""Run the command ``xla-amp`` as ``python -m xla_amp.cli``."""

import sys

from xla_amp.cli import main

sys.exit(main())
