"""The role sparse_layer: a whole MLA layer with its indexer."""
