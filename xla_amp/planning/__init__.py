"""Which operations must stay float32 within an error budget, whoever measures the errors, and plans as policies."""
