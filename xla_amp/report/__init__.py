"""One design for every report of the package: `document` is the data, `page` writes HTML, `terminal` writes text."""
