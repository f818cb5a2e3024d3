"""
What one rank decides or finds wrong, all ranks know: results and errors that are shared over the process group.
"""

import contextlib
import pickle
from datetime import timedelta

# Exchanges within layers that this process has begun. expert_manual.py counts them for the watchdog: when ranks hang in
# one layer, the others wait for those that have begun fewer.
begun = 0
PATIENCE_S = 7200  # for ranks that wait while others hash a checkpoint or rank 0 reads a model: TBs over NFS take hours


def on_rank_0(decide, *arguments, patience_s=None):
    """
    Call decide(*arguments) on rank 0 and return its result, or raise its error, on every rank (one broadcast).

    patience_s: how long the other ranks wait; None = timeout_s, as for any collective, which is too short if rank 0
    reads many gigabytes.
    """
    import torch
    import torch.distributed as dist

    group = dist.new_group(backend='gloo', timeout=timedelta(seconds=patience_s)) if patience_s else None
    outcome, error = [None, None], None
    if dist.get_rank() == 0:
        try:
            outcome[0] = decide(*arguments)
        except Exception as raised:  # bugs as well, since the other ranks are waiting for an answer
            error, outcome[1] = raised, for_other_ranks(raised)
    dist.broadcast_object_list(outcome, group=group, device=torch.device('cpu'))
    if group is not None:
        dist.destroy_process_group(group)
    if outcome[1] is not None:
        raise error or outcome[1]
    return outcome[0]


def raise_together(problem):
    """Raise ValueError(problem) on every rank if any rank has one, the first one's; None = none. Collective, unless
    there is no process group."""
    import torch.distributed as dist

    problems = [problem]
    if dist.is_initialized():
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    for found in filter(None, problems):
        raise ValueError(found)


def for_other_ranks(error):
    """The error to raise on other ranks: a user's mistake itself, if it can be pickled; for a bug only its name and
    message, since rank 0 prints the traceback."""
    if isinstance(error, (ValueError, OSError)):
        with contextlib.suppress(Exception):  # some libraries' errors cannot be unpickled
            return pickle.loads(pickle.dumps(error))
        return (ValueError if isinstance(error, ValueError) else OSError)(str(error))
    return RuntimeError(f'rank 0 has stopped: {type(error).__name__}: {error}')
