"""Tools that look at the core: explain, overflow, monitor, search. No module of the core imports one."""
