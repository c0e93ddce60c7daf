"""Decode: queries against a paged cache of latents."""
