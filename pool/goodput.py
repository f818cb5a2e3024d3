"""What is left of a pool's speed when its jobs come and go."""

import math


def goodput(up_s, down_s, start_s, round_s, inner_s):
    """Inner steps that count, of those that as many jobs would do that are always there and never wait; 0 to 1.

    All in seconds. up_s, down_s: means of how long a job lives, and of how long it is then away, both exponential;
    up_s may be math.inf. start_s: from its start to its first inner step. round_s: from one outer step to the next,
    as it is with jobs that come and go. inner_s: of it, what a job that is there from its beginning trains.

    A step counts if its job lives until it gives its delta. At any moment a job is up with probability U / (U + D),
    and has been for more than start_s with e^(-s/U). A step at time x of a round is followed by inner_s - x to live:

        goodput = U / (U + D) * e^(-s/U) * (U/I) (1 - e^(-I/U)) * I/T          I: inner_s, T: round_s

    If jobs could join at the beginning of a round only, and a delta counted only if its job lived to the round's end,
    it would be U / (U + D) * e^(-(s+T)/U) * I/T. Here a job that joins in mid-round gives the steps that it has done.
    """
    in_lives = inner_s / up_s
    lives_on = -math.expm1(-in_lives) / in_lives if in_lives else 1.0
    return 1 / (1 + down_s / up_s) * math.exp(-start_s / up_s) * lives_on * inner_s / round_s
