"""``python -m xla_amp``, the same as the command ``xla-amp``."""

import sys

from xla_amp.cli import main

if __name__ == "__main__":
    sys.exit(main())
