"""Preparation: index queries and keys behind their projections, normalised, rotated, transformed and in codes."""
