"""Looking into what mixed precision did."""
