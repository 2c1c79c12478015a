"""Files of tensors by name: .pth and .pt (PyTorch), .npz (NumPy), .safetensors. Code in a file is never run."""

import pathlib
from collections.abc import Callable, Mapping
from typing import IO

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from hbf.arguments import home_path
from hbf.errors import UserError, choose
from hbf.files import draft
from hbf.interop import pth

_PREFIXES = ('module.', '_orig_mod.')  # of a network that runs on several devices, and of one that is compiled


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Return the tensors of a file by name.

  PyTorch adds prefixes to the names if a network runs on several devices or is compiled. They are removed, in any
  order.

  Raises:
    UserError: the file does not exist, its ending is unknown, or it holds other things than tensors by name.
  """
  path = pathlib.Path(home_path(path))
  reader = choose('ending of a file of tensors', path.suffix, READERS)
  if not path.is_file():
    raise UserError(f'{path} is not there: give a {", ".join(READERS)} file')
  try:
    path.open('rb').close()  # a reader may say of a file that it may not open that it is damaged
    found = reader(path)
  except (UserError, PermissionError) as error:
    raise UserError(f'{path} cannot be read: {error}') from error
  while found and (prefixes := [prefix for prefix in _PREFIXES if all(name.startswith(prefix) for name in found)]):
    found = {name.removeprefix(prefixes[0]): tensor for name, tensor in found.items()}
  return found


def write(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
  """Write tensors to a file as float32 arrays with names. The ending of the path is the format of the file.

  Raises:
    UserError: the ending is unknown, or the file cannot be written.
  """
  writer = choose('ending of a file of tensors', path.suffix, WRITERS)
  try:
    with draft(path) as file:
      # safetensors and .pth copy the memory of an array, so it has to be in row-major order.
      writer(file, {name: np.asarray(tensor, np.float32, order='C') for name, tensor in tensors.items()})
  except (OSError, safetensors.SafetensorError) as error:
    raise UserError(f'{path} cannot be written: {error}') from error


def load_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Return the arrays of an .npz file by name.

  Raises:
    ValueError: the file cannot be read, or holds something else than arrays.
  """
  try:
    with np.load(path, allow_pickle=False) as arrays:
      found = dict(arrays)
  except Exception as error:  # a damaged archive can raise anything
    raise ValueError(str(error) or type(error).__name__) from error
  if wrong := [name for name, array in found.items() if not isinstance(array, np.ndarray)]:
    raise ValueError(f'its part {wrong[0]!r} is not an array')
  return found


def _read_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
  try:
    found = load_npz(path)
  except ValueError as error:
    raise UserError(f'it is damaged, or not arrays by name ({error})') from error
  # NumPy stores bfloat16 as two bytes without a type.
  tensors = {name: z.view(ml_dtypes.bfloat16) if z.dtype.str == '|V2' else z for name, z in found.items()}
  numeric = (np.number, np.bool_, ml_dtypes.bfloat16)
  if wrong := [name for name, z in tensors.items() if not issubclass(z.dtype.type, numeric)]:
    raise UserError(f'its part {wrong[0]!r} has type {tensors[wrong[0]].dtype}; expected numbers')
  return tensors


def _read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
  try:
    return safetensors.numpy.load_file(path)
  except (safetensors.SafetensorError, OSError) as error:
    raise UserError(f'it is damaged ({error})') from error
  except AttributeError as error:
    raise UserError(f'it has numbers of a type that NumPy lacks ({error}): convert them to float32') from error


def _write_npz(file: IO[bytes], tensors: Mapping[str, np.ndarray]) -> None:
  np.savez(file, allow_pickle=False, **tensors)


def _write_safetensors(file: IO[bytes], tensors: Mapping[str, np.ndarray]) -> None:
  file.write(safetensors.numpy.save(dict(tensors)))


READERS: dict[str, Callable[[pathlib.Path], dict[str, np.ndarray]]] = {
  '.pth': pth.read,
  '.pt': pth.read,
  '.npz': _read_npz,
  '.safetensors': _read_safetensors,
}
WRITERS: dict[str, Callable[[IO[bytes], Mapping[str, np.ndarray]], None]] = {
  '.pth': pth.write,
  '.pt': pth.write,
  '.npz': _write_npz,
  '.safetensors': _write_safetensors,
}
