"""Layer: a whole attention layer with its metadata, weights and cache."""
