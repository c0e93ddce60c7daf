"""Top-k: the columns with the largest of given logits, row by row."""
