"""Recognition of the project that a file of tensors comes from."""

import pathlib

from hbf.interop import authors, google, timm
from hbf.interop.network import Network, read_file
from hbf.interop.table import Tensors


def read(path: pathlib.Path) -> Network:
  """Return the network in a file of Google's, timm's or the authors' code. The names of the tensors tell the project.

  Raises:
    UserError: the file cannot be read, or holds a network of other code.
  """
  return read_file(path, _read)


def _read(tensors: Tensors) -> Network:
  if any('/' in name for name in tensors):
    return google.read(tensors)
  return authors.read(tensors) if any(name.endswith('.attn.M') for name in tensors) else timm.read(tensors)
