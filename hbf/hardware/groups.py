"""Parser for the groups of devices in a collective. XLA's text has four notations for groups."""

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
  """Return the devices of a collective's first group. All groups have the same size.

  XLA writes groups in these forms:

  * A list: `{{0,1},{2,3}}`.
  * A count: `[2,2]<=[4]`. The device numbers 0 … 3 form an array of shape [4], which is reshaped to [2, 2]. Each row
    is a group. In `[2,2]<=[2,2]T(1,0)` the array of device numbers is transposed before it is reshaped.
  * Axes of a mesh: `mesh['a'=2,'b'=2] {'b'}`. The devices of a group differ only in their position along axis b. An
    entry such as `'a':(2)4` stands for a part of axis a: axis a is reshaped to three axes of sizes 2, 4 and the rest,
    and the part is the axis of size 4.
  * Pairs of a permutation. All senders and receivers count as one group.

  Args:
    attributes: attributes of the collective's instruction, as text.
    devices: number of the program's devices. If the text names no group, all of them form one group.

  Raises:
    ValueError: the text has another form.
  """
  if listed := _LISTED.search(attributes):
    return _numbers(listed[1])
  if counted := _COUNTED.search(attributes):
    return tuple(_numbered(counted[2], counted[3]).reshape(_numbers(counted[1]))[0].tolist())
  if mesh := _MESH.search(attributes):
    return _mesh_group(*mesh.groups())
  if pairs := _PAIRS.search(attributes):
    return tuple(sorted({int(number) for number in re.findall(r'\d+', pairs[1])}))
  if 'replica_groups=' in attributes and 'replica_groups={}' not in attributes:
    raise ValueError(f'unknown form of device groups: {attributes}')
  return tuple(range(devices))


def _mesh_group(mesh: str, order: str | None, axes: str) -> tuple[int, ...]:
  sizes = {name: int(size) for name, size in _AXIS.findall(mesh)}
  numbers = np.arange(math.prod(sizes.values()))
  if order:
    ids = _IDS.fullmatch(order)
    numbers = _numbered(ids[1], ids[2]) if ids else np.array(_numbers(order))
  chosen = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _TAKEN.findall(axes)}
  shape, index = list[int](), list[slice | int]()
  for name, length in sizes.items():
    before, size = chosen.get(name, (1, 1))
    shape += [before, size, length // before // size]
    index += [0, slice(None), 0]
  return tuple(numbers.reshape(shape)[tuple(index)].ravel().tolist())


def _numbered(shape: str, order: str | None) -> np.ndarray:
  """Return the device numbers 0, 1, … as an array.

  Args:
    shape: the shape before the transposition, such as '2,4'.
    order: the order of the axes after the transposition, such as '1,0'. None: the array is not transposed.
  """
  counted = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
  return counted.transpose(_numbers(order) if order else None)


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(map(int, text.split(',')))
