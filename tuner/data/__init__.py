"""Files to rows: preparing, reading and describing MindRecord sets; knows nothing of batches."""
