"""What a program does: it is run on samples, compared with another, counted, and searched within an error."""
