"""Problems: the tensors that a case stands for, the calls made of them, and the memory that the caller owns.

Imports from: cases.
"""
