"""Tools that look at the core: explain, overflow, monitor, search, inspect. No module of the core imports one."""
