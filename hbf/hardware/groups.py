"""Which devices take part in a collective, read from XLA's text, which has four ways to say it."""

import math
import re

import numpy as np

_LISTED = re.compile(r'replica_groups=\{\{([\d,]+)\}')
_IOTA = r'\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?'
_COUNTED = re.compile(f'replica_groups={_IOTA}')
_MESH = re.compile(r'replica_groups=mesh\[((?:[^\[\]]|\[[^\]]*\])*)\] \{([^}]*)\}')
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_TAKEN = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r'source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}')


def first_group(attributes: str, devices: int) -> tuple[int, ...]:
  """The devices that exchange something in the first of a collective's groups; the others are as large.

  Groups are listed, `{{0,1},{2,3}}`; counted, `[2,2]<=[4]`, numbers of all devices in an array that is transposed and
  cut into rows; or axes of a mesh, `mesh['a'=2,'b'=2] {'b'}`, of an axis perhaps a part, `'a':(2)4` being the 4 that
  lie within its first factor of 2. A permutation has pairs, and all that send and receive are taken for one group.

  Args:
    attributes: of the instruction, as text.
    devices: of the program, which are one group where none is named.
  """
  if listed := _LISTED.search(attributes):
    return _numbers(listed[1])
  if counted := _COUNTED.search(attributes):
    return tuple(_counted(counted[1], counted[2], counted[3])[0].tolist())
  if mesh := _MESH.search(attributes):
    return _of_mesh(mesh[1], mesh[2])
  if pairs := _PAIRS.search(attributes):
    return tuple(sorted({int(number) for number in re.findall(r'\d+', pairs[1])}))
  return tuple(range(devices))


def _of_mesh(mesh: str, axes: str) -> tuple[int, ...]:
  sizes = {name: int(size) for name, size in _AXIS.findall(mesh)}
  order = re.search(_IOTA, mesh)
  numbers = _counted(*order.groups()) if order else np.arange(math.prod(sizes.values()))
  taken = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _TAKEN.findall(axes)}
  shape, index = list[int](), list[slice | int]()
  for name, length in sizes.items():
    before, size = taken.get(name, (1, 1))
    shape += [before, size, length // before // size]
    index += [0, slice(None), 0]
  return tuple(numbers.reshape(shape)[tuple(index)].ravel().tolist())


def _counted(shape: str, counts: str, order: str | None) -> np.ndarray:
  """The devices' numbers: counted in an array of `counts`, its axes put in `order`, reshaped to `shape`."""
  numbers = np.arange(math.prod(_numbers(counts))).reshape(_numbers(counts))
  return numbers.transpose(_numbers(order) if order else None).reshape(_numbers(shape))


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(map(int, text.split(',')))
