"""
FedEx-LoRA's residual (arXiv 2410.09432): what is lost when replicas average LoRA's matrices A and B each by itself.

A layer of replica m computes (W + s B_m A_m) x, with s = lora_alpha / rank. The mean of the products is more than the
product of the means, by the covariance of B and A over the replicas:

    mean(B_m A_m) = mean(B) mean(A) + mean((B_m - mean(B)) (A_m - mean(A)))

A plain average of A and B keeps the first term. The second one has the rank (M-1) r, too high for one adapter: it goes,
times s, into the frozen W of all replicas. Then the layer computes the mean of what the replicas' layers computed, and
goes on with one adapter of rank r. As a difference of products the residual would be mostly rounding: it is small.

W is no longer that of init_from, but fp32 and in every checkpoint, like all weights. No matrix of W's size travels:
each replica sends its A and B to all others. That is M-1 times the adapters, beside 2 (M-1)/M times for their average.
"""

import torch

from exchange.collectives import gather
from huggingface.files import local_rows
from huggingface.finetune import is_conv1d


@torch.no_grad()
def add_residual(model, outer, fragment):
    """Add the residual to the frozen weights of a fragment that is about to be averaged. Collective.

    model: with LoRA, sharded within each replica. outer: a diloco.Outer that averages, which then sends `fragment`.
    All replicas compute the same sums in the same order, so that on equal hardware their W stay equal to the bit.
    """
    delta = outer.pseudo_gradient(fragment)  # anchor - theta, which has the same covariance as theta
    payloads = gather(delta.view(torch.uint8), outer.replicas, outer.group)
    deltas = payloads.view(torch.float32)  # (M, this rank's numbers)
    outer.bytes_sent += (outer.replicas - 1) * 4 * len(delta)
    replicas = [fragment.views(row) for row in deltas - deltas.mean(dim=0)]
    for name in fragment.parameters:
        stem = name.removesuffix('.lora_A')
        if stem == name or f'{stem}.lora_B' not in fragment.parameters:  # one that is frozen does not vary
            continue
        A = torch.cat([views[name].full_tensor() for views in replicas])  # (M r, in)
        B = torch.cat([views[f'{stem}.lora_B'].full_tensor() for views in replicas], dim=1)  # (out, M r)
        module = model.get_submodule(stem)
        left, right = (A.T, B.T) if is_conv1d(module) else (B, A)
        weight, rows = local_rows(module.weight)
        weight.addmm_(left[rows], right, alpha=module.lora_scale / outer.replicas)  # W += s mean(B_m A_m)
