"""docs/tools.md shows a picture of each report, which its script makes."""

from __future__ import annotations

import re

from source_tree import ROOT

PAGE = (ROOT / "docs" / "tools.md").read_text()
SCRIPT = (ROOT / "scripts" / "report_screenshots.py").read_text()


def test_every_picture_is_made_by_the_script_and_shown():
    made = dict(re.findall(r'Shot\("(\w+)", "(\w+)"', SCRIPT)[::-1])
    names = set(re.findall(r'Shot\("\w+", "(\w+)"', SCRIPT))
    files = {path.stem: path for path in (ROOT / "docs" / "reports").glob("*.png")}
    assert set(made) == {"explain", "monitor", "find_overflow", "inspect", "convert", "compare"}
    assert set(files) == names == set(re.findall(r"\(reports/(\w+)\.png\)", PAGE))
    assert all(path.stat().st_size < 150_000 for path in files.values())
