"""Data loading: batches on the device, padding to buckets."""
