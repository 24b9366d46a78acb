"""AutoSAC."""
