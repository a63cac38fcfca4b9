"""Lets the tests of this folder import `zoo` and `training` from wherever pytest is started."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
