"""What is known of an operation before it runs: shapes and dtypes of results, refusals, checks of arguments."""
