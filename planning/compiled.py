"""
What compiled blocks keep for backward, found without a GPU and without compiling them.

torch.compile traces forward and backward of a block into one graph, and then decides what to keep between the two: the
smallest set of tensors from which backward can be computed without another matmul or attention. So silu(gate) is
computed again, while the inputs of matmuls, copies of weights in the compute dtype among them, are kept. Only after
this does Inductor make kernels of both halves, for which it needs the GPU. Here torch's own functions trace and cut the
graph on the meta device, and Kernels takes Inductor's place.
"""

import operator
from functools import partial

import torch
from torch._prims import rng_prims

from loss import pointwise_cross_entropy


def compile_without_gpu(model, live):
    """Do to a model on the meta device what runtime.begin.make_model() does for CUDA. live: a LiveBytes, to which
    Kernels say what does not count. The model has to run once, so that all is traced, before live may watch it."""
    from torch._dynamo.backends.common import aot_autograd  # here, as they take 2 s
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    torch._dynamo.reset()  # other sizes of the same code would be traced as unknown ones
    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: Kernels(graph, live).run_boxed,
        decompositions=select_decomp_table(),
        partition_fn=partial(min_cut_rematerialization_partition, compiler='inductor'),
        keep_inference_input_mutations=True,  # the loss writes its gradient into the logits
    )
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend)
    model.loss_kernel = torch.compile(pointwise_cross_entropy, backend=backend, dynamic=False)


class Kernels(torch.fx.Interpreter):
    """
    Runs a graph operation by operation, but lets only those results count that Inductor's kernels write to memory.

    Inductor fuses pointwise operations and reductions with those that read them. So results of these operations are in
    memory if a matmul, attention or another kernel of its own reads them, or if the graph returns them.
    """

    def __init__(self, graph, live):
        super().__init__(graph)
        self.live = live
        alone = [node for node in graph.graph.nodes if not is_fused(node)]
        self.in_memory = {*alone, *(owner(read) for node in alone for read in node.all_input_nodes)}

    def run_boxed(self, inputs):
        results = self.boxed_run(inputs)  # it empties the list, so that backward frees what it has used
        self.env = {}  # else the results would live on
        return results

    run_boxed._boxed_call = True  # for aot_autograd

    def call_function(self, target, args, kwargs):
        # What is computed twice repeats its random numbers, and attention might draw some. Not so on the meta device.
        if target is rng_prims.run_and_save_rng_state:
            return torch.empty(0), args[0](*args[1:], **kwargs)
        if target is rng_prims.run_with_rng_state:
            return args[1](*args[2:], **kwargs)
        return super().call_function(target, args, kwargs)

    def run_node(self, node):
        self.live.is_paused = node not in self.in_memory
        try:
            return super().run_node(node)
        finally:
            self.live.is_paused = False


def is_fused(node):
    """Whether Inductor makes one kernel of an operation and of those that read it."""
    from torch._functorch.partitioners import get_default_op_list

    aten = torch.ops.aten
    also = {aten.cat, aten.embedding, aten.slice_scatter, aten.select_scatter, aten.constant_pad_nd}
    also |= {aten.copy, aten.copy_}
    fused = get_default_op_list().fusible_ops | also
    return is_view(node) or getattr(node.target, 'overloadpacket', node.target) in fused


def is_view(node):
    return node.target is operator.getitem or getattr(node.target, 'is_view', False)


def owner(node):
    """The node whose result is in the memory that this node's result is a view of."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node
