"""From a captured step to a verified plan."""
