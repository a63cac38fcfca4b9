"""What people are shown: pages of a title, facts and tables, tables of decided operations, paths for readers."""
