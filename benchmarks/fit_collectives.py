def fit_collectives(d):
    return {}
