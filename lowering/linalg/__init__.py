"""Matrix products, factorizations and solves."""
