"""Higher-order primitives: control flow, calls, custom derivatives."""
