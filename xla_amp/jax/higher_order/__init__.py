"""Rules for higher-order primitives: control flow, calls, custom derivatives."""
