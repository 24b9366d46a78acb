"""Searches: how fast they are, and how well predictions rank published runs."""
