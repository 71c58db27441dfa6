"""Small grids: every pair of values of every two factors, in few cases."""

import itertools
import random


def pairwise(cases, **factors):
    """One choice of `factors` for each of `cases`, so that every pair of their values occurs.

    Always the same ones. Raises `AssertionError` if so few cases cannot hold all pairs.
    """
    rng = random.Random(0)
    names = list(factors)
    pairs_of = lambda choice: set(itertools.combinations(zip(names, choice, strict=True), 2))
    missing = set().union(*map(pairs_of, itertools.product(*factors.values())))
    chosen = []
    for case in cases:
        tries = [tuple(map(rng.choice, factors.values())) for _ in range(200)]
        best = max(tries, key=lambda choice: len(pairs_of(choice) & missing))
        missing -= pairs_of(best)
        chosen.append((case, dict(zip(names, best, strict=True))))
    assert not missing, f"pairs without a case: {sorted(missing, key=str)}"
    return chosen
