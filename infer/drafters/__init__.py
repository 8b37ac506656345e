"""Bundled drafters, a folder each."""
