"""Floor 1: the interfaces of the vLLM documents, the registry and the selector, and one thin adapter per library.

An adapter translates this contract into one library's call and back; a library is imported only when its backend is
asked for.
"""
