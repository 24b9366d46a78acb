"""Mutation testing: small faults put into the code one by one, to see which of them the tests notice."""
