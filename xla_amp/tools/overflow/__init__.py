"""`find_overflow`: the operation that makes the first inf or NaN."""
