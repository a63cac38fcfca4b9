#!/usr/bin/env bash
# Builds the documentation site in build/site, with the extra `docs`; a warning (a dead link, a page or a public name
# that is missing) is an error. Read build/site/index.html: pages and search need no server.
set -euo pipefail
cd "$(dirname "$0")/.."
NO_MKDOCS_2_WARNING=1 exec "${PYTHON:-python}" -m mkdocs build --strict "$@"
