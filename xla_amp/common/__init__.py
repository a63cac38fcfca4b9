"""Modules that every other folder may import: settings, events, files, types, tables, progress."""
