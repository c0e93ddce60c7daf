"""Reports: the outcome of a run as data, and views of it."""
