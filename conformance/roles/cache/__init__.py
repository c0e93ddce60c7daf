"""Cache operations: entries written and gathered, slots computed."""
