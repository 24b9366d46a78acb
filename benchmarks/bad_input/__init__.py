"""A generator of malformed inputs, and the judge of what the command line makes of them."""
