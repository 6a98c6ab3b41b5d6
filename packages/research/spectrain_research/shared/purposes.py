"""What the random numbers of ideas are for, beside the purposes of `spectrain.randomness`: the same
keys never serve two purposes.
"""

JUDGED = 14
TRAJECTORY = 22
CHANNEL = 24
