"""Floor 1: the interfaces of the vLLM documents, the registry and the selector, and one thin adapter per library."""
