"""What a search found: its result, and the files of the best configuration."""
