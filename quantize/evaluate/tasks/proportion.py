"""A share of successes, and how sure one can be of it."""

import math

Z_95 = 1.959963984540054


def wilson(successes: int, trials: int, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a proportion; (0, 1) without trials.

    Unlike `p ± z * sqrt(p (1 - p) / n)` it stays inside [0, 1] and has a width at 0 and at n successes: 29 of 30 is
    0.833 to 0.994.
    """
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    centre = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
