"""What a compiled program moves: bytes to and from a device's memory, and between devices, read from XLA's text.

XLA's own count of bytes takes a loop once and doesn't know which values stay on the chip; for a GPU that isn't there
it gives none. The text says both: how long a loop is, and by S(1) in a layout that a TPU keeps a value on the chip.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hbf.hardware.groups import first_group

COLLECTIVES = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')
# Kernels that XLA calls and doesn't write.
KERNELS = {
  '__cudnn$fmha': 'cuDNN',
  '__gpu$xla.gpu.triton': 'Triton',
  'triton_kernel_call': 'Triton',
  'mosaic_gpu': 'Mosaic',
  'tpu_custom_call': 'Mosaic',
}

# What moves nothing by itself. What runs asynchronously is counted where it begins.
_FREE = {'parameter', 'constant', 'get-tuple-element', 'tuple', 'bitcast', 'after-all', 'partition-id', 'replica-id'}
_PASSING = {'bitcast', 'copy', 'reshape', 'transpose'}
_SLICES = {'slice', 'dynamic-slice', 'gather'}  # read as much as they give

_HEADER = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\{$')
_ARRAY = re.compile(r'\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](\{[^{}]*\})?')
_NAME = re.compile(r'%([\w.\-]+)')
_OPCODE = re.compile(r' *([\w\-]+)\(')
_CALLED = re.compile(r'(?:calls|body|to_apply)=%?([\w.\-]+)')


class Array(NamedTuple):
  """An array of a program.

  Attributes:
    bytes: of its elements, without the padding of its layout.
    in_memory: whether it lies in the device's memory, not on the chip.
  """

  bytes: int
  in_memory: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
  """A line of a computation.

  Attributes:
    name: of its value.
    opcode: what it does.
    arrays: its value, several if that is a tuple.
    operands: names of the values that it takes.
    rest: its attributes, as text; of a constant and a parameter also what stands between its brackets.
  """

  name: str
  opcode: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  rest: str

  @property
  def called(self) -> str:
    """Name of the computation that it runs."""
    found = _CALLED.search(self.rest)
    assert found, f'{self.name} runs no computation'
    return found[1]


Computation = Mapping[str, Instruction]  # the last instruction is the root


class Collective(NamedTuple):
  """What devices exchange something by.

  Attributes:
    kind: one of `COLLECTIVES`.
    devices: that exchange among themselves: a group.
    hosts: that a group's devices are on.
  """

  kind: str
  devices: int
  hosts: int


class Traffic(NamedTuple):
  """What one device moves.

  Attributes:
    memory: bytes that are read from its memory and written to it.
    network: by collective, bytes that it takes or gives, whichever is more.
  """

  memory: int
  network: Mapping[Collective, int]


def count_traffic(text: str, hosts: Sequence[int] = (0,)) -> Traffic:
  """What a program moves on one device when it runs.

  Args:
    text: of the compiled program. A loop counts as often as it runs, and once if only running it shows how often.
    hosts: for each of its devices the host that it is on.
  """
  computations, entry = _parse(text)
  memory, network = 0, collections.Counter[Collective]()
  within = set[str]()
  for computation, instruction, times in _runs(computations, entry, 1):
    memory += times * _moved(computations, computation, instruction)
    for kind, scope, line in _exchanges(computations, computation, instruction, within):
      group = first_group(line.rest, len(hosts))
      among = Collective(kind, len(group), len({hosts[device] for device in group}))
      network[among] += times * _exchanged(scope, line)
  return Traffic(memory, {among: size for among, size in network.items() if among.devices > 1})


def _exchanges(
  computations: Mapping[str, Computation], computation: Computation, instruction: Instruction, within: set[str]
) -> Iterator[tuple[str, Computation, Instruction]]:
  """The collectives that an instruction is or has within it: kind, computation, line.

  A TPU's compiler has some go on beside the products of several fusions, and writes them, with their channels, into
  each of these: `within` has the channels that have been met so.
  """
  if (kind := instruction.opcode.removesuffix('-start')) in COLLECTIVES:
    yield kind, computation, instruction
  if instruction.opcode != 'fusion':
    return
  scope = computations[instruction.called]
  for line in scope.values():
    if line.opcode in COLLECTIVES:
      channel = re.search(r'channel_id=\d+', line.rest)
      if channel is None or channel[0] not in within:
        within.add(channel[0] if channel else '')
        # A sum of which each device cuts its slice out.
        yield 'reduce-scatter' if 'all-reduce-scatter' in instruction.called else line.opcode, scope, line


def _exchanged(computation: Computation, instruction: Instruction) -> int:
  """Bytes that a collective takes or gives, whichever is more."""
  taken = sum(_value(computation, name).bytes for name in instruction.operands)
  given = sum(array.bytes for array in instruction.arrays)
  if instruction.opcode in ('all-gather-start', 'collective-permute-start'):  # its value is (taken, given, …)
    given -= taken
  return max(taken, given)


def count_kernels(text: str) -> dict[str, int]:
  """How many calls a compiled program has of each kernel that XLA didn't write."""
  counts = collections.Counter[str]()
  for target, label in KERNELS.items():
    counts[label] += text.count(f'custom_call_target="{target}')
  return {label: count for label, count in counts.items() if count}


def _runs(
  computations: Mapping[str, Computation], name: str, times: int
) -> Iterator[tuple[Computation, Instruction, int]]:
  """Every instruction that moves something, its computation, and how often it runs."""
  for instruction in computations[name].values():
    if instruction.opcode == 'while':
      yield from _runs(computations, instruction.called, times * _trips(computations, instruction))
    elif instruction.opcode in ('call', 'async-start'):
      yield from _runs(computations, instruction.called, times)
    elif instruction.opcode == 'conditional':
      for branch in _NAME.findall(instruction.rest.split('branch_computations={')[-1].split('}')[0]):
        yield from _runs(computations, branch, times)
    elif instruction.opcode not in _FREE and not instruction.opcode.endswith('-done'):
      yield computations[name], instruction, times


def _trips(computations: Mapping[str, Computation], loop: Instruction) -> int:
  """How often a loop runs: as XLA noted it, or the number that its condition compares a counter with; else 1."""
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
    return int(known[1])
  condition = re.search(r'condition=%?([\w.\-]+)', loop.rest)
  lines = computations[condition[1]].values() if condition else ()
  limits = [int(line.rest) for line in lines if line.opcode == 'constant' and line.rest.isdigit()]
  counted = any(line.opcode == 'compare' and 'direction=LT' in line.rest for line in lines)
  return limits[0] if counted and len(limits) == 1 else 1


def _moved(computations: Mapping[str, Computation], computation: Computation, instruction: Instruction) -> int:
  """Bytes of memory that an instruction reads and writes when it runs once."""
  if instruction.opcode == 'copy-start':  # its value is (copy, original, context)
    return sum(array.bytes for array in instruction.arrays if array.in_memory)
  if instruction.opcode == 'slice-start':  # its value is ((original), slice, context)
    original, part, *_ = instruction.arrays
    return part.bytes * (original.in_memory + part.in_memory)
  inner: Computation = {instruction.name: instruction}
  scope = computation
  names, root = list(instruction.operands), instruction
  if instruction.opcode == 'fusion':
    inner = scope = computations[instruction.called]
    names = _parameters(inner)
    *_, root = inner.values()
  given = [_value(computation, name) for name in instruction.operands]
  read = sum(
    _used(computations, inner, name, array) for name, array in zip(names, given, strict=True) if array.in_memory
  )
  sizes = _written(computations, scope, root)
  return read + sum(size for size, array in zip(sizes, instruction.arrays, strict=False) if array.in_memory)


def _parameters(computation: Computation) -> list[str]:
  """Their names, in order."""
  parameters = [line for line in computation.values() if line.opcode == 'parameter']
  return [line.name for line in sorted(parameters, key=lambda line: int(line.rest.partition(')')[0]))]


def _used(computations: Mapping[str, Computation], inner: Computation, name: str, array: Array) -> int:
  """Bytes read of a value: of one that is only sliced the slices, and none of one that is only written into."""
  read = 0
  users = [line for line in inner.values() if name in line.operands]
  for user in users:
    if _passes(computations, user):
      read += _used(computations, inner, user.name, array)
    elif user.opcode == 'fusion' and user.operands.count(name) == 1:
      within = computations[user.called]
      read += _used(computations, within, _parameters(within)[user.operands.index(name)], array)
    elif user.opcode in _SLICES and user.operands[0] == name:
      read += user.arrays[0].bytes
    elif user.opcode != 'dynamic-update-slice' or user.operands[0] != name:
      read += array.bytes
  return min(array.bytes, read) if users else array.bytes


def _passes(computations: Mapping[str, Computation], line: Instruction) -> bool:
  """Whether a line within a fusion gives what it is given, perhaps in another layout: alone it moves nothing."""
  if line.opcode == 'fusion':
    return all(part.opcode == 'parameter' or part.opcode in _PASSING for part in computations[line.called].values())
  return line.opcode in _PASSING


def _written(computations: Mapping[str, Computation], scope: Computation, root: Instruction) -> list[int]:
  """Bytes written for each array of a value: of one that is changed in place what changes."""
  if root.opcode == 'tuple':
    return [size for name in root.operands for size in _written(computations, scope, scope[name])]
  source = root
  while _passes(computations, source) and source.operands[0] in scope:
    source = scope[source.operands[0]]
  if source.opcode == 'dynamic-update-slice':
    return [_value(scope, source.operands[1]).bytes]
  if '__cublas' in root.rest:
    return [root.arrays[0].bytes]  # then comes its workspace
  return [array.bytes for array in root.arrays]


def _value(computation: Computation, name: str) -> Array:
  """A value as one array; a tuple's parts together."""
  arrays = computation[name].arrays
  return Array(sum(array.bytes for array in arrays), any(array.in_memory for array in arrays))


def _parse(text: str) -> tuple[dict[str, Computation], str]:
  """All computations by name, and the name of the one that runs."""
  computations: dict[str, dict[str, Instruction]] = {}
  entry, lines = '', dict[str, Instruction]()
  for line in text.splitlines():
    if header := _HEADER.match(line):
      lines = computations.setdefault(header[2], {})
      entry = header[2] if header[1] else entry
    elif ' = ' in line and line.startswith('  '):
      instruction = _parse_line(line)
      lines[instruction.name] = instruction
  return dict(computations), entry


def _parse_line(line: str) -> Instruction:
  """An instruction: `[ROOT ]%name = type opcode(operands), attributes`."""
  name, _, right = line.strip().removeprefix('ROOT ').partition(' = ')
  end = _closing(right, 0) if right.startswith('(') else right.index(' ')
  found = _OPCODE.match(right, end)
  assert found, f'no instruction of XLA: {line}'
  close = _closing(right, found.end() - 1)
  operands = right[found.end() : close - 1]
  is_leaf = found[1] in ('constant', 'parameter')
  return Instruction(
    name.removeprefix('%'),
    found[1],
    tuple(_parse_arrays(right[:end])),
    () if is_leaf else tuple(_NAME.findall(operands)),
    operands if is_leaf else right[close:],
  )


def _parse_arrays(text: str) -> Iterator[Array]:
  for kind, bits, shape, layout in _ARRAY.findall(text):
    count = math.prod(int(size) for size in shape.split(',') if size)
    size = 1 if kind == 'pred' else int(bits) / 8
    yield Array(math.ceil(count * size), not re.search(r'S\([1-9]', layout))


def _closing(text: str, opening: int) -> int:
  """Where the bracket that opens there has been closed."""
  depth = 0
  for place in range(opening, len(text)):
    depth += (text[place] == '(') - (text[place] == ')')
    if not depth:
      return place + 1
  raise ValueError(f'a bracket is left open: {text[opening:]}')
