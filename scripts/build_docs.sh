#!/usr/bin/env bash
# Builds the documentation site in build/site, with the extra `docs`; a warning (a dead link, a page or a public name
# that is missing) is an error. Open build/site/index.html, no server is needed.
set -euo pipefail
cd "$(dirname "$0")/.."
NO_MKDOCS_2_WARNING=1 exec "${PYTHON:-python}" -m mkdocs build --strict "$@"
