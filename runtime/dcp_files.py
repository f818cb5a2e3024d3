"""
What torch.distributed.checkpoint (DCP) writes, read as data.

DCP's index is a pickle, and so is the header of each tensor, a torch.save() of its own. Whoever unpickles a file calls
what it names, so somebody else's file runs somebody else's code; lists of allowed names have had holes. Here nothing is
unpickled. as_data() takes the bytes apart and looks up no name, and the numbers of a tensor lie in a zip archive as
they are, so that it is enough to know where.
"""

import io
import math
import pickletools
import zipfile

import torch

DCP = 'torch.distributed.checkpoint'
NOT_AS_EXPECTED = (ValueError, LookupError, TypeError, AttributeError)  # what as_data() and its readers may meet

# --- pickles ----------------------------------------------------------------------------------------------------------


class Named:
    """What a pickle refers to by name, or what it would make of that name: nothing is looked up, nothing is called."""

    def __init__(self, name, arguments=(), state=None):
        self.name, self.arguments, self.state = name, arguments, state


def as_data(content):
    """
    What a pickle describes, without unpickling it: dicts, lists, tuples, strings and numbers, and a Named for each
    class and each object.

    pickletools only splits the bytes into opcodes. Raises ValueError for all opcodes that an index has no need of.
    """
    stack, marks, memo = [], [], {}

    def since_mark():
        first = marks.pop()
        items = stack[first:]
        del stack[first:]
        return items

    try:
        for opcode, argument, _ in pickletools.genops(content):
            name = opcode.name
            if name in ('PROTO', 'FRAME'):
                pass
            elif name in ('BININT', 'BININT1', 'BININT2', 'LONG1', 'SHORT_BINUNICODE', 'BINUNICODE'):
                stack.append(argument)
            elif name in ('NONE', 'NEWTRUE', 'NEWFALSE'):
                stack.append({'NONE': None, 'NEWTRUE': True, 'NEWFALSE': False}[name])
            elif name in ('EMPTY_DICT', 'EMPTY_LIST', 'EMPTY_TUPLE'):
                stack.append({'EMPTY_DICT': dict, 'EMPTY_LIST': list, 'EMPTY_TUPLE': tuple}[name]())
            elif name == 'MARK':
                marks.append(len(stack))
            elif name == 'TUPLE':
                stack.append(tuple(since_mark()))
            elif name in ('TUPLE1', 'TUPLE2', 'TUPLE3'):
                stack[-int(name[-1]) :] = [tuple(stack[-int(name[-1]) :])]
            elif name in ('APPEND', 'APPENDS'):
                items = [stack.pop()] if name == 'APPEND' else since_mark()
                stack[-1] += items
            elif name in ('SETITEM', 'SETITEMS'):
                items = [stack.pop(-2), stack.pop()] if name == 'SETITEM' else since_mark()
                require(all(type(key) in (str, Named) for key in items[::2]), 'a dict whose keys are no names')
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            elif name in ('MEMOIZE', 'BINPUT', 'LONG_BINPUT'):
                memo[len(memo) if name == 'MEMOIZE' else argument] = stack[-1]
            elif name in ('BINGET', 'LONG_BINGET'):
                stack.append(memo[argument])
            elif name == 'GLOBAL':
                stack.append(Named(argument.replace(' ', '.')))
            elif name == 'STACK_GLOBAL':
                module, name = stack.pop(-2), stack.pop()
                require(type(module) is type(name) is str, 'a name that is no text')
                stack.append(Named(f'{module}.{name}'))
            elif name in ('REDUCE', 'NEWOBJ'):
                arguments, made = stack.pop(), stack.pop()
                stack.append(Named(made.name, arguments))
            elif name == 'BUILD':
                state = stack.pop()
                stack[-1].state = state
            elif name == 'BINPERSID':
                stack.append(Named('storage', stack.pop()))
            elif name == 'STOP':
                return stack.pop()
            else:
                raise ValueError(f'the opcode {name}')
    except NOT_AS_EXPECTED as error:
        raise ValueError(f'has what no index of a checkpoint has ({type(error).__name__}: {str(error)[:80]})') from None
    raise ValueError('ends in the middle')


# --- the two kinds of file --------------------------------------------------------------------------------------------


def tensors_in(path):
    """What a .metadata says, in the form of index.json; but the offsets are where torch.save() has begun each piece,
    and `length` is how many bytes that has written."""
    with open(path, 'rb') as file:
        content = file.read()
    try:
        metadata = as_data(content)
        require(metadata.name == f'{DCP}.metadata.Metadata', f'a {metadata.name}')
        stored = {}
        for place, info in metadata.state['storage_data'].items():
            require(place.name == f'{DCP}.metadata.MetadataIndex', f'a {place.name}')
            require(info.name == f'{DCP}.filesystem._StorageInfo', f'a {info.name}')
            require(not info.state.get('transform_descriptors'), 'compressed tensors')
            name, offset = place.state['fqn'], place.state['offset']
            types = [
                type(value) for value in (name, *(info.state[key] for key in ('relative_path', 'offset', 'length')))
            ]
            require(types == [str, str, int, int], 'the place of a piece')
            stored[name, offset and tuple(sizes_of(offset))] = info.state
        tensors = {}
        for key, tensor in metadata.state['state_dict_metadata'].items():
            require(type(key) is str and tensor.name == f'{DCP}.metadata.TensorStorageMetadata', f'a {tensor.name}')
            pieces = []
            for chunk in tensor.state['chunks']:
                begin, shape = sizes_of(chunk.state['offsets']), sizes_of(chunk.state['sizes'])
                info = stored.get((key, tuple(begin))) or stored[key, None]
                names = {'file': info['relative_path'], 'offset': info['offset'], 'length': info['length']}
                pieces.append({'begin': begin, 'shape': shape, **names})
            dtype = tensor.state['properties'].state[0].name.removeprefix('torch.')
            tensors[key] = {'dtype': dtype, 'shape': sizes_of(tensor.state['size']), 'pieces': pieces}
        return tensors
    except NOT_AS_EXPECTED as error:
        reason = f'{type(error).__name__}: {str(error)[:200]}'
        raise ValueError(f'{path} is not the index of a checkpoint ({reason})') from None


def sizes_of(size):
    """The numbers of a pickled torch.Size."""
    (numbers,) = size.arguments
    require(size.name == 'torch.Size' and type(numbers) is tuple and all(type(n) is int for n in numbers), 'no size')
    return list(numbers)


def position_of(file, piece, length, dtype):
    """Where in a file the numbers of a piece begin that torch.save() has written from piece.offset on: a zip archive,
    in which they are stored as they are. Raises ValueError for anything else."""
    if not math.prod(piece.shape):
        return 0
    try:
        with zipfile.ZipFile(Window(file, piece.offset, length)) as archive:
            members = {member.filename.partition('/')[2]: member for member in archive.infolist()}
            numbers, header = members['data/0'], members['data.pkl']
            require(header.compress_type == numbers.compress_type == zipfile.ZIP_STORED and header.file_size < 10_000)
            header = as_data(archive.read(header))
        storage, first, shape, strides = header.arguments[:4]
        require(header.name == 'torch._utils._rebuild_tensor_v2' and storage.name == 'storage' and first == 0)
        require(shape == piece.shape and strides == torch.empty(shape, device='meta').stride())
        require(numbers.file_size == numbers.compress_size == math.prod(piece.shape) * dtype.itemsize)
        file.seek(piece.offset + numbers.header_offset + 26)
        name_and_extra = file.read(4)  # lengths of two fields of the member's header, which takes 30 bytes without them
        begin = numbers.header_offset + 30 + sum(int.from_bytes(name_and_extra[n : n + 2], 'little') for n in (0, 2))
        require(begin + numbers.file_size <= length)
        return piece.offset + begin
    except (*NOT_AS_EXPECTED, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        what = f'what lies at {piece.offset} for {length} bytes is no tensor of {piece.shape} and {dtype}'
        raise ValueError(f'{file.name}: {what} ({type(error).__name__}: {str(error)[:80]})') from None


class Window(io.RawIOBase):
    """Some bytes of an open file as a file of their own."""

    def __init__(self, file, begin, length):
        if type(length) is not int or length < 0:
            raise ValueError('its length is none')
        self.file, self.begin, self.length, self.at = file, begin, length, 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def tell(self):
        return self.at

    def seek(self, offset, whence=0):
        self.at = max(0, offset + (0, self.at, self.length)[whence])
        return self.at

    def readinto(self, buffer):
        self.file.seek(self.begin + self.at)
        size = self.file.readinto(memoryview(buffer)[: max(0, self.length - self.at)])
        self.at += size
        return size


def require(holds, what='another structure'):
    if not holds:
        raise ValueError(what)
