"""Traffic of a compiled program: bytes to and from a device's memory, and between devices, parsed from XLA's text.

XLA's own count has three faults. It counts the instructions of a loop only once, it does not know which values stay
on the chip, and it is missing for a GPU that this machine does not have. XLA's text has the number of iterations of a
loop. It marks values that a TPU keeps on the chip by S(1) in their layout.

A computation is a list of instructions in this text. The entry computation is the program itself. Other computations
are the bodies of loops, the branches of conditions, and fusions.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hbf.hardware.groups import first_group

COLLECTIVES = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')
# Kernels that XLA calls but does not generate.
KERNELS = {
  '__cudnn$fmha': 'cuDNN',
  '__gpu$xla.gpu.triton': 'Triton',
  'triton_kernel_call': 'Triton',
  'mosaic_gpu': 'Mosaic',
  'tpu_custom_call': 'Mosaic',
}

# Instructions that move nothing. An asynchronous instruction is counted at its start.
_FREE = {'parameter', 'constant', 'get-tuple-element', 'tuple', 'bitcast', 'after-all', 'partition-id', 'replica-id'}
_PASSING = {'bitcast', 'copy', 'reshape', 'transpose'}
_SLICES = {'slice', 'dynamic-slice', 'gather'}  # they read as many bytes as they return

_HEADER = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\{$')
_ARRAY = re.compile(r'\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](\{[^{}]*\})?')
_NAME = re.compile(r'%([\w.\-]+)')
_OPCODE = re.compile(r' *([\w\-]+)\(')
_SCOPE = re.compile(r'metadata=\{[^}]*op_name="([^"]*)"')
_CALLED = re.compile(r'(?:calls|body|to_apply)=%?([\w.\-]+)')


class Array(NamedTuple):
  """An array of a program.

  Attributes:
    bytes: bytes of the array's elements, without the padding of its layout.
    in_memory: True if the array lies in the device's main memory (HBM). False if it lies in memory on the chip, such
      as a TPU's VMEM.
  """

  bytes: int
  in_memory: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
  """An instruction: a line of a computation in XLA's text.

  Attributes:
    name: name of the instruction's value.
    opcode: name of the operation.
    arrays: the arrays of the instruction's value. A tuple has several arrays.
    operands: names of the operands.
    rest: the attributes as text. For a constant or a parameter, it is the text in the brackets after the opcode.
  """

  name: str
  opcode: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  rest: str

  @property
  def called(self) -> str:
    """The name of the computation that the instruction runs."""
    found = _CALLED.search(self.rest)
    assert found, f'{self.name} runs no computation'
    return found[1]


Computation = Mapping[str, Instruction]  # the last instruction is the root


class Collective(NamedTuple):
  """A kind of communication between devices.

  Attributes:
    kind: one of `COLLECTIVES`, such as 'all-reduce'.
    devices: number of devices in a group. The devices of a group communicate with each other.
    hosts: number of hosts that the devices of a group belong to.
  """

  kind: str
  devices: int
  hosts: int


class Traffic(NamedTuple):
  """Bytes that one device moves.

  Attributes:
    memory: bytes that the device reads from its memory and writes to its memory.
    network: for each kind of collective, the bytes that the device receives or sends, whichever are more.
  """

  memory: int
  network: Mapping[Collective, int]


def count_traffic(text: str, hosts: Sequence[int] = (0,)) -> Traffic:
  """Count the bytes that one device moves in one call of a program.

  Args:
    text: text of the compiled program. An instruction in a loop counts once for each iteration, or only once if the
      text does not have the number of iterations.
    hosts: for each device, the index of its host.
  """
  computations, entry = _parse(text)
  memory, network = 0, collections.Counter[Collective]()
  within = set[str]()
  for computation, instruction, times in _executed(computations, entry, 1):
    memory += times * _memory_bytes(computations, computation, instruction)
    for kind, scope, line in _collectives(computations, computation, instruction, within):
      group = first_group(line.rest, len(hosts))
      collective = Collective(kind, len(group), len({hosts[device] for device in group}))
      network[collective] += times * _network_bytes(scope, line)
  return Traffic(memory, {collective: size for collective, size in network.items() if collective.devices > 1})


def instruction_traffic(text: str) -> dict[str, tuple[str, int]]:
  """Return (scope, bytes) for each instruction that moves data, by the name of the instruction.

  The scope is the path that JAX gives to an operation, such as 'jit(f)/jvp(Model)/block0/stage1/dot_general'. It is
  '' if XLA made the instruction itself. The bytes are those read from memory plus those written to it, in one call of
  the program. An instruction in a loop counts once for each iteration.
  """
  computations, entry = _parse(text)
  moved = {}
  for computation, instruction, times in _executed(computations, entry, 1):
    scope = _SCOPE.search(instruction.rest)
    size = times * _memory_bytes(computations, computation, instruction)
    moved[instruction.name] = (scope[1] if scope else '', size)
  return moved


def _collectives(
  computations: Mapping[str, Computation], computation: Computation, instruction: Instruction, within: set[str]
) -> Iterator[tuple[str, Computation, Instruction]]:
  """Yield each collective of an instruction as (its kind, the computation that contains it, its own instruction).

  The argument `instruction` may be a collective itself, or a fusion that contains collectives. A TPU's compiler
  overlaps some collectives with the matrix products of several fusions. Then it writes the collective into each of
  these fusions, with one channel_id. `within` has the channel_ids that earlier calls found, and gets the new ones. So
  each collective is yielded once.
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
        # An all-reduce after which each device keeps its slice is a reduce-scatter.
        yield 'reduce-scatter' if 'all-reduce-scatter' in instruction.called else line.opcode, scope, line


def _network_bytes(computation: Computation, instruction: Instruction) -> int:
  """Return the bytes that a device receives or sends in a collective, whichever are more."""
  taken = sum(_value(computation, name).bytes for name in instruction.operands)
  given = sum(array.bytes for array in instruction.arrays)
  if instruction.opcode in ('all-gather-start', 'collective-permute-start'):  # its value is (operand, result, …)
    given -= taken
  return max(taken, given)


def count_kernels(text: str) -> dict[str, int]:
  """Return the number of calls of external kernels, by a label such as 'cuDNN' or 'Triton'."""
  counts = collections.Counter[str]()
  for target, label in KERNELS.items():
    counts[label] += text.count(f'custom_call_target="{target}')
  return {label: count for label, count in counts.items() if count}


def _executed(
  computations: Mapping[str, Computation], name: str, times: int
) -> Iterator[tuple[Computation, Instruction, int]]:
  """Yield every instruction that moves data, with its computation and the number of its executions.

  The search begins in the computation `name`, which is executed `times` times.
  """
  for instruction in computations[name].values():
    if instruction.opcode == 'while':
      yield from _executed(computations, instruction.called, times * _trip_count(computations, instruction))
    elif instruction.opcode in ('call', 'async-start'):
      yield from _executed(computations, instruction.called, times)
    elif instruction.opcode == 'conditional':
      for branch in _NAME.findall(instruction.rest.split('branch_computations={')[-1].split('}')[0]):
        yield from _executed(computations, branch, times)
    elif instruction.opcode not in _FREE and not instruction.opcode.endswith('-done'):
      yield computations[name], instruction, times


def _trip_count(computations: Mapping[str, Computation], loop: Instruction) -> int:
  """Return a loop's number of iterations, from XLA's note or the limit of the loop's counter. 1 if it is unknown."""
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
    return int(known[1])
  condition = re.search(r'condition=%?([\w.\-]+)', loop.rest)
  lines = computations[condition[1]].values() if condition else ()
  limits = [int(line.rest) for line in lines if line.opcode == 'constant' and line.rest.isdigit()]
  counted = any(line.opcode == 'compare' and 'direction=LT' in line.rest for line in lines)
  return limits[0] if counted and len(limits) == 1 else 1


def _memory_bytes(computations: Mapping[str, Computation], computation: Computation, instruction: Instruction) -> int:
  """Return the bytes of memory that one execution of an instruction reads and writes."""
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
    _read_bytes(computations, inner, name, array) for name, array in zip(names, given, strict=True) if array.in_memory
  )
  sizes = _written_bytes(computations, scope, root)
  return read + sum(size for size, array in zip(sizes, instruction.arrays, strict=False) if array.in_memory)


def _parameters(computation: Computation) -> list[str]:
  """Return the names of a computation's parameters, in order."""
  parameters = [line for line in computation.values() if line.opcode == 'parameter']
  return [line.name for line in sorted(parameters, key=lambda line: int(line.rest.partition(')')[0]))]


def _read_bytes(computations: Mapping[str, Computation], inner: Computation, name: str, array: Array) -> int:
  """Return how many bytes the computation `inner` reads of the value `name`, which is the array `array`.

  If `inner` uses only slices of the value, only the bytes of the slices count. If it only overwrites the value, the
  result is 0. Otherwise all bytes of the array count.
  """
  read = 0
  users = [line for line in inner.values() if name in line.operands]
  for user in users:
    if _is_passthrough(computations, user):
      read += _read_bytes(computations, inner, user.name, array)
    elif user.opcode == 'fusion' and user.operands.count(name) == 1:
      within = computations[user.called]
      read += _read_bytes(computations, within, _parameters(within)[user.operands.index(name)], array)
    elif user.opcode in _SLICES and user.operands[0] == name:
      read += user.arrays[0].bytes
    elif user.opcode != 'dynamic-update-slice' or user.operands[0] != name:
      read += array.bytes
  return min(array.bytes, read) if users else array.bytes


def _is_passthrough(computations: Mapping[str, Computation], line: Instruction) -> bool:
  """Return True if an instruction only copies or rearranges its operand, which moves no bytes within a fusion."""
  if line.opcode == 'fusion':
    return all(part.opcode == 'parameter' or part.opcode in _PASSING for part in computations[line.called].values())
  return line.opcode in _PASSING


def _written_bytes(computations: Mapping[str, Computation], computation: Computation, root: Instruction) -> list[int]:
  """Return the number of bytes written for each array of the value of `root`, an instruction in `computation`.

  If the instruction updates an array in place, only the bytes of the update count.
  """
  if root.opcode == 'tuple':
    return [size for name in root.operands for size in _written_bytes(computations, computation, computation[name])]
  source = root
  while _is_passthrough(computations, source) and source.operands[0] in computation:
    source = computation[source.operands[0]]
  if source.opcode == 'dynamic-update-slice':
    return [_value(computation, source.operands[1]).bytes]
  if '__cublas' in root.rest:
    return [root.arrays[0].bytes]  # the other array is a workspace
  return [array.bytes for array in root.arrays]


def _value(computation: Computation, name: str) -> Array:
  """Return the value `name` as one array. For a tuple, its arrays' bytes are added up."""
  arrays = computation[name].arrays
  return Array(sum(array.bytes for array in arrays), any(array.in_memory for array in arrays))


def _parse(text: str) -> tuple[dict[str, Computation], str]:
  """Return all computations by name, and the name of the entry computation."""
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
  """Parse a line of an instruction: `[ROOT ]%name = type opcode(operands), attributes`."""
  name, _, right = line.strip().removeprefix('ROOT ').partition(' = ')
  end = _closing_bracket(right, 0) if right.startswith('(') else right.index(' ')
  found = _OPCODE.match(right, end)
  assert found, f'not an instruction of XLA: {line}'
  close = _closing_bracket(right, found.end() - 1)
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


def _closing_bracket(text: str, opening: int) -> int:
  """Return the position after the bracket that closes the bracket at `opening`."""
  depth = 0
  for position in range(opening, len(text)):
    depth += (text[position] == '(') - (text[position] == ')')
    if not depth:
      return position + 1
  raise ValueError(f'a bracket is not closed: {text[opening:]}')
