"""Which devices take part in a collective, read from XLA's text, which has four ways to say it."""

import math
import re

import numpy as np

_LISTED = re.compile(r'replica_groups=\{\{([\d,]+)\}')
_COUNTED = re.compile(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?')
_MESH = re.compile(r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\)?)\))? \{([^}]*)\}')
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_TAKEN = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_IDS = re.compile(r'\[([\d,]+)\](?:T\(([\d,]+)\))?')
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
    return tuple(_counted(counted[2], counted[3]).reshape(_numbers(counted[1]))[0].tolist())
  if mesh := _MESH.search(attributes):
    return _of_mesh(*mesh.groups())
  if pairs := _PAIRS.search(attributes):
    return tuple(sorted({int(number) for number in re.findall(r'\d+', pairs[1])}))
  if 'replica_groups=' in attributes and 'replica_groups={}' not in attributes:
    raise ValueError(f'groups of devices in no known form: {attributes}')
  return tuple(range(devices))


def _of_mesh(mesh: str, order: str | None, axes: str) -> tuple[int, ...]:
  sizes = {name: int(size) for name, size in _AXIS.findall(mesh)}
  numbers = np.arange(math.prod(sizes.values()))
  if order:
    ids = _IDS.fullmatch(order)
    numbers = _counted(ids[1], ids[2]) if ids else np.array(_numbers(order))
  taken = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _TAKEN.findall(axes)}
  shape, index = list[int](), list[slice | int]()
  for name, length in sizes.items():
    before, size = taken.get(name, (1, 1))
    shape += [before, size, length // before // size]
    index += [0, slice(None), 0]
  return tuple(numbers.reshape(shape)[tuple(index)].ravel().tolist())


def _counted(shape: str, order: str | None) -> np.ndarray:
  """The devices' numbers, counted in an array of a shape whose axes are then put in an order."""
  counted = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
  return counted.transpose(_numbers(order) if order else None)


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(map(int, text.split(',')))
