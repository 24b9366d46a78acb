"""The space of a search: what it is asked for, GPUs that it may use, knobs and their values, and the legal layouts."""
