"""Reading and writing of PyTorch's .pth files without PyTorch. Nothing in a file is run.

Since PyTorch 1.6, torch.save writes zip archives. The archive's file ROOT/data.pkl is a pickle of the object. In this
pickle, a tensor is a function call with the key of a storage as an argument. The archive's file ROOT/data/KEY has the
numbers of the storage. In general, a pickle may call any function. Here it may call only the functions in `_GLOBALS`,
and the call for a tensor only records its arguments.
"""

import collections
import dataclasses
import io
import math
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import IO, Any

import jax.numpy as jnp
import numpy as np

from hbf.errors import UserError

# PyTorch's types of storage, and the types of the numbers in them.
_STORAGES = {
  'DoubleStorage': np.dtype('<f8'),
  'FloatStorage': np.dtype('<f4'),
  'HalfStorage': np.dtype('<f2'),
  'BFloat16Storage': np.dtype(jnp.bfloat16),
  'LongStorage': np.dtype('<i8'),
  'IntStorage': np.dtype('<i4'),
  'ShortStorage': np.dtype('<i2'),
  'CharStorage': np.dtype('i1'),
  'ByteStorage': np.dtype('u1'),
  'BoolStorage': np.dtype('?'),
}


@dataclasses.dataclass(frozen=True)
class _Tensor:
  """The location of a tensor in its storage. Offset and strides count numbers, not bytes.

  `storage` is the description that `_Unpickler.persistent_load` returns.
  """

  storage: tuple
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]


def _tensor(storage: tuple, offset: int, shape: tuple, strides: tuple, *_: Any) -> _Tensor:
  return _Tensor(storage, offset, shape, strides)


def _parameter(tensor: _Tensor, *_: Any) -> _Tensor:
  return tensor


_GLOBALS: dict[tuple[str, str], Callable] = {
  ('collections', 'OrderedDict'): collections.OrderedDict,
  ('torch._utils', '_rebuild_tensor_v2'): _tensor,
  ('torch._utils', '_rebuild_parameter'): _parameter,
}


class _Unpickler(pickle.Unpickler):
  """An unpickler that accepts tensors and dictionaries only."""

  def find_class(self, module: str, name: str) -> Any:
    """Return the object that a pickle asks for by the name `module`.`name`.

    It is the value in `_GLOBALS`, or, for a type of storage, `name` itself. Raise UserError for any other name.
    """
    if module == 'torch' and name in _STORAGES:
      return name
    if (module, name) not in _GLOBALS:
      raise UserError(f'it asks for {module}.{name}, which no file of plain tensors needs: it was not read')
    return _GLOBALS[module, name]

  def persistent_load(self, pid: Any) -> Any:
    """Return `pid` unchanged: the description ('storage', type, key, device, size) of a storage in the file.

    The numbers of the storage are read later, by its key.
    """
    return pid


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Return the tensors in a file that torch.save wrote: a state_dict, or a dictionary with a state_dict as 'model'.

  Raises:
    UserError: the file is damaged, was written by PyTorch before 1.6, or holds other things than tensors by name.
  """
  if not zipfile.is_zipfile(path):
    raise UserError(
      'it is not a zip archive as PyTorch writes since 1.6: load it and save it again with a newer PyTorch'
    )
  try:
    with zipfile.ZipFile(path) as archive:
      return _read(archive)
  except UserError:
    raise
  except Exception as error:  # a damaged pickle can raise anything
    raise UserError(f'it is damaged ({type(error).__name__}: {error})') from error


def _read(archive: zipfile.ZipFile) -> dict[str, np.ndarray]:
  roots = [name.removesuffix('data.pkl') for name in archive.namelist() if name.endswith('/data.pkl')]
  if len(roots) != 1:
    raise UserError('it has no data.pkl: use a file that torch.save wrote')
  root = roots[0]
  if f'{root}byteorder' in archive.namelist() and archive.read(f'{root}byteorder') != b'little':
    raise UserError('its numbers are big-endian: save it on a little-endian machine')
  content = _Unpickler(io.BytesIO(archive.read(f'{root}data.pkl'))).load()
  if not isinstance(content, dict):
    raise UserError(f'it holds a {type(content).__name__}, not tensors by name: save model.state_dict()')
  if isinstance(content.get('model'), dict):
    content = content['model']
  if others := [str(name) for name, value in content.items() if not isinstance(value, _Tensor)]:
    raise UserError(f'it holds more than tensors ({", ".join(others[:5])}): save model.state_dict() alone')
  return {str(name): _to_array(archive, root, tensor) for name, tensor in content.items()}


def _to_array(archive: zipfile.ZipFile, root: str, tensor: _Tensor) -> np.ndarray:
  """Return a copy of a tensor as an array. Raise an error if the tensor exceeds its storage."""
  _, kind, key, *_ = tensor.storage
  storage = np.frombuffer(archive.read(f'{root}data/{key}'), _STORAGES[kind])
  shape, strides, offset = tensor.shape, tensor.strides, tensor.offset
  last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
  if (
    min((offset, *shape, *strides)) < 0
    or math.prod(shape) > storage.size
    or (0 not in shape and last >= storage.size)
  ):
    raise UserError(f'it is damaged: a tensor of shape {shape} lies outside its storage')
  steps = [stride * storage.itemsize for stride in strides]
  return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps, writeable=False).copy()


def write(file: IO[bytes], tensors: Mapping[str, np.ndarray]) -> None:
  """Write contiguous float32 tensors as a file that torch.load reads, with weights_only=True too."""
  with zipfile.ZipFile(file, 'w', zipfile.ZIP_STORED) as archive:
    archive.writestr('archive/data.pkl', _pickle_tensors(tensors))
    archive.writestr('archive/byteorder', 'little')
    for key, tensor in enumerate(tensors.values()):
      archive.writestr(f'archive/data/{key}', tensor.astype('<f4').tobytes())
    archive.writestr('archive/version', '3\n')


def _pickle_tensors(tensors: Mapping[str, np.ndarray]) -> bytes:
  """Return the pickle of a dictionary of tensors.

  The pickle is built by hand, because the module `pickle` cannot name PyTorch's functions without PyTorch.
  """
  parts = [pickle.PROTO, b'\x02', pickle.EMPTY_DICT, pickle.MARK]
  for key, (name, tensor) in enumerate(tensors.items()):
    strides = (stride // tensor.itemsize for stride in tensor.strides)
    kind, size = _global('torch', 'FloatStorage'), _int(tensor.size)
    storage = _tuple(_text('storage'), kind, _text(str(key)), _text('cpu'), size)
    hooks = _global('collections', 'OrderedDict') + pickle.EMPTY_TUPLE + pickle.REDUCE
    arguments = _tuple(
      storage + pickle.BINPERSID,
      _int(0),
      _tuple(*map(_int, tensor.shape)),
      _tuple(*map(_int, strides)),
      pickle.NEWFALSE,
      hooks,
    )
    parts += [_text(name), _global('torch._utils', '_rebuild_tensor_v2'), arguments, pickle.REDUCE]
  return b''.join([*parts, pickle.SETITEMS, pickle.STOP])


def _tuple(*parts: bytes) -> bytes:
  return pickle.MARK + b''.join(parts) + pickle.TUPLE


def _text(text: str) -> bytes:
  return pickle.BINUNICODE + struct.pack('<I', len(text.encode())) + text.encode()


def _int(number: int) -> bytes:
  return pickle.BININT + struct.pack('<i', number)


def _global(module: str, name: str) -> bytes:
  return pickle.GLOBAL + f'{module}\n{name}\n'.encode()
