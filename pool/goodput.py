"""How much of a pool's speed remains when its jobs come and go."""

import math


def goodput(up_s, down_s, start_s, round_s, inner_s):
    """The inner steps that count, as a fraction of those that equally many jobs would do if they were always up and
    never waited; 0 to 1.

    All arguments are in seconds. up_s, down_s: how long a job lives and how long it is then away, on average, both
    exponentially distributed; up_s may be math.inf. start_s: from a job's start to its first inner step. round_s: from
    one outer step to the next, in a pool whose jobs come and go. inner_s: the part of round_s in which a job trains
    that is up from the round's beginning.

    A step counts if its job lives until it has delivered its delta. At any moment a job is up with probability
    U / (U + D), and one that is up has been so for more than start_s with probability e^(-s/U). After a step at time x
    of a round, the job has to live for another inner_s - x. Averaged over x, this gives

        goodput = U / (U + D) * e^(-s/U) * (U/I) (1 - e^(-I/U)) * I/T          I: inner_s, T: round_s

    Here a job that joins in mid-round delivers the steps that it has done. If jobs could join only at the beginning of
    a round, and a delta counted only if its job lived to the round's end, the goodput would be
    U / (U + D) * e^(-(s+T)/U) * I/T.
    """
    in_lives = inner_s / up_s
    lives_on = -math.expm1(-in_lives) / in_lives if in_lives else 1.0
    return 1 / (1 + down_s / up_s) * math.exp(-start_s / up_s) * lives_on * inner_s / round_s
