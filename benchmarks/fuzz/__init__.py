"""A fuzz of `autosac.apply`: many kinds of small models under planned, legal and hostile plans.

Each is compared bitwise with the same model without a plan. See `benchmarks.fuzz.__main__` for the options and
`benchmarks.fuzz.trial` for what is compared.
"""
