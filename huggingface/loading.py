"""
The weights of a Hugging Face folder, read in slices: into a sharded model for training, or whole for sample.py,
evaluate.py and exports, where LoRA is merged into what it was trained beside.
"""

import copy

import torch
import torch.distributed as dist

from huggingface import finetune, lora, nf4
from huggingface.files import Weights, local_rows, names_of_tokens, refuse_not_finite, tensors_to_load
from model import is_load
from system import collectives, processes
from system.errors import is_out_of_memory, one_line


@torch.no_grad()
def load(model, pretrained, seed=0):
    """Fill a model, sharded or not, with the weights of its folder: in fp32, whatever they are stored in, and weights
    that are not trained in frozen_dtype. Collective.

    Each rank reads the rows that it keeps and, with nf4, packs them. If transformers' files have other names than its
    model in memory (as for experts of some mixtures, which are stacked when they are loaded), rank 0 loads the whole
    model and broadcasts it.
    LoRA begins with A = lora.initial_lora_a() and B = 0, so that at first it changes nothing.
    Raises ValueError on every rank for a tensor of another shape than the configuration says, or one with NaN in it.
    """
    weights = Weights(pretrained.weights_folder)
    found, lacking = weights.find(model)
    whole = {}  # on rank 0 alone
    if lacking:
        collectives.on_rank_0(
            lambda: whole.update(whole_model(pretrained).state_dict()), patience_s=collectives.PATIENCE_S
        )
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    sizes = {name: weights.nbytes(found[name]) if name in found else 0 for name in tensors_to_load(model)}
    problem = None
    for name in processes.progress(f'loading {weights.folder}', sizes):
        local, rows = local_rows(tensors[name])
        is_packed = local.dtype == torch.uint8
        shape = tensors[name].shape
        shape = (shape[0], nf4.columns_of(shape[1])) if is_packed else shape
        if name.endswith('.lora_B'):
            local.zero_()
        elif name.endswith('.lora_A'):
            local.copy_(lora.initial_lora_a(name, tensors[name].shape, seed)[rows])
        elif lacking:
            values = from_rank_0(whole.get(name), shape, torch.float32 if is_packed else local.dtype)
            lora.fill_rows(local, values[rows])
        else:
            weights.check_shape(found[name], shape)
            try:
                if local.numel():
                    lora.fill_rows(local, weights.read(found[name], rows))
            except ValueError as error:  # in rows that this rank alone may have read
                problem = str(error)
                break
    collectives.raise_together(problem)


def whole_model(pretrained):
    """The model as transformers itself loads it, in fp32. Raises ValueError if the folder lacks some of its weights,
    which would otherwise be random numbers."""
    transformers = finetune.transformers_offline()
    options = {'dtype': torch.float32, 'trust_remote_code': pretrained.trust_remote_code, 'output_loading_info': True}
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(pretrained.weights_folder, **options)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        problem = f'transformers cannot load its weights: {one_line(repr(error))}'
        raise ValueError(f'{pretrained.weights_folder}: {problem}') from error
    if info['missing_keys']:
        folder, lacking = pretrained.weights_folder, min(info['missing_keys'])
        raise ValueError(
            f'{folder} lacks {lacking}, and {len(info["missing_keys"]) - 1} more weights: '
            f'`python download_model.py --model={folder}` lists them; copy or download it again'
        )
    for name, tensor in model.state_dict().items():
        refuse_not_finite(name, tensor, pretrained.weights_folder)
    if pretrained.added_rows:
        model.resize_token_embeddings(pretrained.vocab_size, mean_resizing=False)
        parameters, old = dict(model.named_parameters()), pretrained.vocab_size - pretrained.added_rows
        for name in names_of_tokens(model):
            parameters[name].data[old:] = parameters[name].data[:old].double().mean(0).float()
    if finetune.has_uneven_experts(model):
        model.set_experts_implementation('eager')
    return model.eval()


def from_rank_0(tensor, shape, dtype):
    """Rank 0's whole tensor, on every rank, in host memory. Collective."""
    whole = torch.empty(shape, dtype=dtype) if tensor is None else tensor.to(dtype).contiguous()
    dist.broadcast(whole, src=0)
    return whole


def seen_in_training(pretrained):
    """A function of (name, rows of that tensor in the folder) that returns the values which training used instead,
    rounded by frozen_dtype. LoRA was trained beside these values, so it is merged into them."""
    if pretrained.frozen_rounding == 'float32':
        return lambda name, rows: rows
    with torch.device('meta'):
        model = finetune.for_training(pretrained)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters(remove_duplicate=False)}

    def seen(name, rows):
        if dtypes.get(name) == torch.uint8:
            return nf4.dequantize(nf4.quantize(rows))
        return rows.bfloat16() if dtypes.get(name) == torch.bfloat16 else rows

    return seen


def line_of_base(pretrained):
    """A line that says so if LoRA is merged into weights that differ from the folder's by rounding; else None."""
    rounding = pretrained.frozen_rounding
    if not pretrained.lora_rank or rounding == 'float32':
        return None
    return f'LoRA is merged into what it was trained beside: {pretrained.weights_folder} rounded to {rounding}'


def base_weights(model, pretrained, weights):
    """{name: tensor} of the model's weights that a LoRA checkpoint's `weights` lack: read from the folder, rounded as
    training saw them, in fp32. model: on meta."""
    absent = [name for name in tensors_to_load(model) if name not in weights]
    if not absent:  # a checkpoint of an earlier version has all of them
        return {}
    stored = Weights(pretrained.weights_folder)
    found, lacking = stored.find(model)
    seen, kinds = seen_in_training(pretrained), model.state_dict()
    if lacking:
        whole = whole_model(pretrained).state_dict()
        return {name: seen(name, whole[name]).to(kinds[name].dtype) for name in absent}
    names = processes.progress(f'reading {stored.folder}', {name: stored.nbytes(found[name]) for name in absent})
    return {name: seen(name, stored.read(found[name])).to(kinds[name].dtype) for name in names}


def for_inference(pretrained, weights):
    """A model of transformers' own class, without ForTraining, with a checkpoint's `weights`, {name: tensor}. LoRA is
    merged; weights that the checkpoint leaves out come from pretrained's folder. Does not move or cast anything."""
    weights = {name: tensor for name, tensor in weights.items() if not is_load(name)}
    with torch.device('meta'):
        model = pretrained.empty_model()
    if pretrained.lora_rank:
        weights = {**base_weights(model, pretrained, weights), **weights}
    put_in(model, lora.merge_lora(model, weights, pretrained), model.tie_weights)
    finetune.fill_buffers(model, 'cpu')
    return model.eval()


def for_generation(pretrained, weights, compute_dtype, device):
    """The model of for_training() with LoRA merged; call cast_weights() next. weights: {name: tensor} of a checkpoint;
    None = those of the folder, as they are stored."""
    whole = copy.copy(pretrained)
    whole.lora_rank, whole.freeze, whole.frozen_dtype = 0, None, None
    with torch.device('meta'):
        model = finetune.for_training(whole, compute_dtype, device)
    if weights is None:
        weights = weights_of_folder(pretrained, model)
    elif pretrained.lora_rank:
        weights = lora.merge_lora(model, {**base_weights(model, pretrained, weights), **weights}, pretrained)
    weights = {name: tensor for name, tensor in weights.items() if not is_load(name)}
    put_in(model, weights, model.tie)
    finetune.fill_buffers(model, device)
    return model.eval()


def put_in(model, weights, tie):
    """Give a model on meta its weights, {name: tensor}. tie: function that makes those that are one tensor share it.
    Raises ValueError if some are missing, or belong to no parameter."""
    _, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    tie()
    lacking = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if lacking or unexpected:
        problem = f'lack {lacking[0]}' if lacking else f'have {unexpected[0]}, which it has not'
        raise ValueError(
            f'the weights for {type(model).__name__} {problem}: they belong to another model; copy them anew'
        )


def cast_weights(model, compute_dtype, device):
    """Cast all weights once, for generation, in which each token uses every weight. (Not by .to(compute_dtype), which
    would also round RoPE's frequencies.) Those of a folder are read from the disk here."""
    for parameter in processes.progress('weights', {parameter: parameter.nbytes for parameter in model.parameters()}):
        parameter.data = parameter.data.to(device, compute_dtype)


def weights_of_folder(pretrained, model):
    """{name: tensor} of a folder, as they are stored. Raises ValueError for a tensor of another shape than the
    configuration says."""
    weights = Weights(pretrained.weights_folder)
    found, lacking = weights.find(model)
    if lacking:
        return whole_model(pretrained).state_dict()
    tensors = model.state_dict()
    for name, stored in found.items():
        weights.check_shape(stored, tensors[name].shape)
    return {name: weights.read(stored) for name, stored in found.items()}
