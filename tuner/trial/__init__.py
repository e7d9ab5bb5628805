"""One measurement in one process and one folder; its failures are values."""
