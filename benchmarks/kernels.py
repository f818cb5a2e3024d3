"""
Which kernels would torch.compile make of a block on a GPU, and how many bytes do they move? Found without a GPU.

    python benchmarks/kernels.py                          # Llama 1B in bfloat16, a step of 8 x 2048 tokens under DDP
    python benchmarks/kernels.py --float8 --sharded       # in 8 bits, with weights as FSDP gathers them
    python benchmarks/kernels.py --size='124M gpt2'

Inductor first decides which operations share a kernel, and writes the kernels only then. So it is told here that there
is an H100, is given the graphs of forward and backward that planning/compiled.py makes as well, and is stopped once it
has decided. Each line is a kernel: what it reads and writes in bytes per token, over how many rows and columns it runs,
and of what it is made. Matmuls and attention have kernels of their own, and are added up apart. At the end stands the
time that all blocks' other kernels would take if nothing but the bytes counted, at the 3 TB/s that an H100 copies.

This asks private functions of torch, those of 2.13.
"""

import argparse
import contextlib
import copy
import operator
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map

import float8
from benchmarks.forms import KeptTransposed
from benchmarks.gpu import SIZES
from model import GPT, ModelConfig
from planning.activations import kernels_of_cuda

BYTES_PER_SECOND = 3e12
H100 = DeviceProperties('cuda', 0, 132, 90, 9, 65536, 2048, 1024, 32)


@contextlib.contextmanager
def on_an_h100():
    """Inductor asks these what the device can do."""
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    with (
        mock.patch.object(torch.cuda, 'get_device_properties', lambda *_: properties),
        mock.patch.object(torch.cuda, 'get_device_capability', lambda *_: (9, 0)),
        mock.patch.object(scheduler, 'has_triton', lambda: True),
        mock.patch.object(DeviceProperties, 'create', lambda device: H100),
    ):
        yield


class MovedToCuda(torch.fx.Interpreter):
    """Runs a graph of the meta device on fake tensors of a GPU, and notes these in its nodes."""

    def run_node(self, node):
        cuda = torch.device('cuda', 0)
        for name in ('args', 'kwargs'):
            moved = tree_map(lambda value: cuda if isinstance(value, torch.device) else value, getattr(node, name))
            setattr(node, name, moved)
        node.meta['val'] = super().run_node(node)
        return node.meta['val']


def kernels_of(graph, is_backward):
    """Inductor's kernels for a graph of the meta device, in their order."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, on_an_h100(), V.set_fake_mode(mode):
        given = [node.meta['val'] for node in graph.graph.nodes if node.op == 'placeholder']
        inputs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device='cuda') for t in given]
        MovedToCuda(graph).run(*inputs)
        view_to_reshape(graph)
        post_grad_passes(graph, not is_backward)
        lowering = GraphLowering(graph, example_inputs=inputs, is_backward=is_backward, shape_env=mode.shape_env)
        with V.set_debug_handler(DebugContext()), V.set_graph_handler(lowering):
            lowering.run(*inputs)
            lowering.init_wrapper_code()
            lowering._update_scheduler()
            return [describe(node) for node in lowering.scheduler.nodes if node.get_read_write_buffers_sizes()]


def describe(node):
    """(bytes, its loops or None for a matmul or attention, what it is made of)."""
    operations = {str(origin.target) for part in node.get_nodes() for origin in part.node.get_origins()}
    short = sorted({name.removesuffix('.default').split('.', 1)[-1] for name in operations})
    return node.get_read_write_buffers_sizes(), None if node.is_extern() else node.group[1], ' '.join(short)


def whole(node):
    """The node whose result is in the memory that this node's result is a view of."""

    def is_part(node):
        return getattr(node.target, 'is_view', False)

    while is_part(node) or (node.target is operator.getitem and is_part(node.args[0])):
        node = node.all_input_nodes[0]
    return node


def graphs_of(config, batch_size, in_8_bits, is_sharded):
    """The graphs of a block's forward and backward, and the bytes that are kept from one to the other."""
    graphs, kept = [], []

    def cut(joint, inputs, **options):
        forward, backward = min_cut_rematerialization_partition(joint, inputs, compiler='inductor', **options)
        results = forward.graph.output_node().args[0][options['num_fwd_outputs'] :]
        made = {whole(node) for node in results if isinstance(node, torch.fx.Node)}
        values = [node.meta['val'] for node in made if node.op != 'placeholder']
        kept.extend(value.nbytes for value in values if isinstance(value, torch.Tensor))
        return forward, backward

    def note(graph, inputs):
        graphs.append(copy.deepcopy(graph))  # the one that runs stays on the meta device
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=note, decompositions=select_decomp_table(), partition_fn=cut)
    with kernels_of_cuda():
        with torch.device('meta'):
            model = GPT(config, torch.bfloat16)
        if in_8_bits:
            float8.convert(model)
        if is_sharded:
            model.bfloat16()
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
        tokens = torch.zeros(batch_size, config.block_size, dtype=torch.long, device='meta')
        model(tokens, tokens)[0].backward()
    return graphs, sum(kept)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [name for name, size in SIZES.items() if not size.get('n_experts') and 'n_layer' in size]
    parser.add_argument('--size', choices=sizes, default='Llama 1B')
    parser.add_argument('--float8', action='store_true')
    parser.add_argument('--sharded', action='store_true')
    parser.add_argument(
        '--with_f5', action='store_true', help='float8 keeps transposed inputs: see benchmarks/forms.py'
    )
    args = parser.parse_args()

    if args.with_f5:
        float8.Float8Matmul = KeptTransposed
    size = SIZES[args.size]
    config = ModelConfig.from_keys(size | dict(vocab_size=50304, n_layer=1))
    tokens, total, number, of_others = size['batch_size'] * config.block_size, 0, 0, 0
    graphs, kept = graphs_of(config, size['batch_size'], args.float8, args.sharded)
    for graph, name in zip(graphs, ('forward', 'backward'), strict=True):
        print(name)
        for moved, loops, operations in kernels_of(graph, name == 'backward'):
            where = 'its own' if loops is None else ' x '.join(str(n) for n in loops)
            print(f'{moved / tokens:10,.1f}  {where:16}  {operations}')
            if loops is None:
                of_others += moved
            else:
                total, number = total + moved, number + 1
    seconds = total * size['n_layer'] / BYTES_PER_SECOND
    print(
        f'{number} kernels move {total / tokens:,.0f} bytes per token and layer, {1e3 * seconds:.1f} ms of all '
        f'{size["n_layer"]} layers; matmuls and attention {of_others / tokens:,.0f}; {kept / tokens:,.0f} are kept'
    )


if __name__ == '__main__':
    main()
