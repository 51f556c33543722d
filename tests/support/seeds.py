"""Seeds of tests that draw their own inputs: the same every time in CI, others at a desk and in a soak."""

import os
import random


def fresh_seed() -> int:
    """A seed, to be named where the test fails."""
    return 20 if os.environ.get("CI") else random.SystemRandom().randrange(1 << 30)
