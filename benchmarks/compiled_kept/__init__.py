"""Whether compiled modules save what their plan states."""
