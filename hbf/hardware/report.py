"""Report on programs compiled for a topology: memory, operations, traffic and estimated time."""

import hashlib
import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from hbf.errors import UserError
from hbf.hardware.batch import largest_batch
from hbf.hardware.bound import bound
from hbf.hardware.chips import GIB
from hbf.hardware.hlo import Collective, count_kernels, count_traffic
from hbf.hardware.programs import Program, Programs, plan_of, trace_programs
from hbf.hardware.topologies import Topology
from hbf.markdown import table
from hbf.models.flops import count_jaxpr, count_products
from hbf.training.machine import commit, versions
from hbf.training.sharding import batch_shares, make_mesh

# Without a device, XLA cannot time algorithms, so autotuning is off. Triton's matrix products are off too, because
# they then lack a default tiling for some shapes.
_OPTIONS = {'cuda': {'xla_gpu_autotune_level': '0', 'xla_gpu_enable_triton_gemm': False}, 'tpu': None}

# A lowered program calls a custom-partitioned function by the number of a Python object, which differs every time.
_PARTITIONED = re.compile(r'(@CustomSPMDPartitioning\(.*?backend_config = )"\d+"')
_ADDRESS = re.compile(r' at 0x[0-9a-f]+')


def describe_programs(
  config: ConfigDict,
  topology: Topology,
  text: pathlib.Path | None = None,
  known: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
  """Compile the programs of a config for a topology and describe them.

  Args:
    config: the config of a run.
    topology: the topology to compile for.
    text: folder to write the text of the compiled programs to. None writes no text.
    known: earlier results of this function. A program that one of them has is not compiled again, if the versions of
      the packages are the same and `text` is None.

  Returns:
    The report, ready for JSON. `docs/how-to/plan-hardware.md` explains it.

  Raises:
    UserError: the config is wrong, the compiler is missing, or `text` cannot be a folder.
  """
  if text is not None:
    try:
      text.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise UserError(f'{text} cannot be a folder ({error.strerror}): choose another --text') from None
  # A Pallas kernel contains the paths of its source. Without them, the program is the same in every folder.
  jax.config.update('jax_hlo_source_file_canonicalization_regex', '.*')
  devices = topology.compile_devices()
  with topology.tracing():
    programs = trace_programs(config, devices)
  about = {
    'topology': topology.name,
    'device': topology.chip.kind,
    'devices': topology.devices,
    'dataset': config.data.name,
    'model': config.model.name,
    'recipe': config.recipe,
    'dtype': config.model.dtype,
    'form': (config.model.stage2 or {}).get('implementation', ''),
    'params': programs.plan.parameters,
    'parameter_bytes': programs.parameter_bytes,
    'optimizer_bytes': programs.optimizer_bytes,
    'memory_bytes': topology.chip.usable_bytes,
    'unit': programs.plan.task.unit,
    'versions': versions() | topology.compiler_versions(),
  }
  valid = [record for record in known if record['versions'] == about['versions']]
  before = {row['program_hash']: row for record in valid for row in record['programs']}
  rows = [_describe(program, programs, topology, text, before) for program in programs.each]
  compiled_at = {row['program_hash']: record['commit'] for record in valid for row in record['programs']}
  commits = {compiled_at.get(row['program_hash']) or commit() for row in rows}
  return about | {'commit': commits.pop() if len(commits) == 1 else commit(), 'programs': rows}


def hash_program(text: str, jaxpr: Any) -> str:
  """Return a hash of a program, to recognize a program that has not changed. It is the same in every process.

  Args:
    text: text of the lowered program.
    jaxpr: the jaxpr of the program. The jaxpr has the content of functions that the text names only by a number.
  """
  if _PARTITIONED.search(text):
    text = _PARTITIONED.sub(r'\1""', text) + _ADDRESS.sub('', str(jaxpr))
  return hashlib.sha256(text.encode()).hexdigest()


def _describe(
  program: Program, programs: Programs, topology: Topology, text: pathlib.Path | None, known: dict[str, Any]
) -> dict[str, Any]:
  """Return a program's part of the report. `known` has the parts of earlier reports, by hash of the program."""
  begin = time.perf_counter()
  with jax.set_mesh(programs.mesh):  # type: ignore[arg-type]  # a concrete mesh
    lowered = program.traced.lower()
  seconds = time.perf_counter() - begin
  program_hash = hash_program(lowered.as_text(), program.traced.jaxpr)
  if program_hash in known and text is None:
    facts = known[program_hash]  # the estimates are computed again
  else:
    facts = {'program_hash': program_hash, 'lower_seconds': round(seconds, 2)}
    facts |= _facts(program, lowered, programs.mesh, topology, text)
  unit = programs.plan.task.unit
  about = {'name': program.name, f'{unit}s': program.units, 'held_bytes': program.held_bytes}
  jaxpr = program.traced.jaxpr.jaxpr
  counted = count_products(jaxpr, topology.chip.platform)
  products = {kind: count / topology.devices for kind, count in counted.items()}
  counts = {'flops': count_jaxpr(jaxpr) / topology.devices, 'product_flops': products}
  return facts | about | counts | _estimate(program, unit, facts, products, topology)


def _facts(
  program: Program, lowered: Any, mesh: Mesh, topology: Topology, text: pathlib.Path | None
) -> dict[str, Any]:
  """Return the compiler's facts about a program. If it is too large to compile, only `needed_bytes` is known."""
  begin = time.perf_counter()
  needed, compiled = _compile(program.name, lowered, topology)
  seconds = {'compile_seconds': round(time.perf_counter() - begin, 2)}
  if compiled is None:
    return seconds | {'needed_bytes': needed}
  hlo = compiled.as_text()
  if text is not None:
    (text / f'{topology.name}-{program.name.replace(" ", "-")}.txt').write_text(hlo)
  memory, counted = compiled.memory_analysis(), compiled.cost_analysis() or {}
  traffic = count_traffic(hlo, [device.process_index for device in mesh.devices.flat])
  arguments, results, aliased = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.alias_size_in_bytes
  temporaries, code = memory.temp_size_in_bytes, memory.generated_code_size_in_bytes
  return seconds | {
    'argument_bytes': arguments,
    'output_bytes': results,
    'aliased_bytes': aliased,
    'temporary_bytes': temporaries,
    'code_bytes': code,
    'needed_bytes': arguments + results - aliased + temporaries + code,
    'compiler_flops': counted.get('flops'),
    'compiler_traffic_bytes': counted.get('bytes accessed'),
    'traffic_bytes': traffic.memory,
    'collectives': [among._asdict() | {'bytes': size} for among, size in traffic.network.items()],
    'kernels': count_kernels(hlo),
  }


def _compile(name: str, lowered: Any, topology: Topology) -> tuple[int, Any]:
  """Return (0, the compiled program), or (the bytes that it needs, None) if it is too large to compile."""
  try:
    return 0, lowered.compile(compiler_options=_OPTIONS[topology.chip.platform])
  except jax.errors.JaxRuntimeError as error:
    if used := re.search(r'(?:Used |\()([\d.]+)([KMGT])\)? (?:of|exceeds)', str(error)):
      return int(float(used[1]) * 1024 ** ('KMGT'.index(used[2]) + 1)), None
    raise UserError(
      f'the compiler of {topology.chip.kind}s refuses the {name}: {str(error).splitlines()[0]}'
    ) from error


def _estimate(
  program: Program, unit: str, facts: dict[str, Any], products: dict[str, float], topology: Topology
) -> dict[str, Any]:
  """Return the entries of the report about a program's memory and time.

  `unit` is 'image' or 'token', `facts` are the result of `_facts`, and `products` are the operations of the program's
  matrix products on one device, by type.
  """
  peak = facts['needed_bytes'] + program.held_bytes
  fit = {'peak_bytes': peak, 'fits': peak <= topology.chip.usable_bytes}
  if 'traffic_bytes' not in facts:
    return fit
  estimate = bound(topology.chip, products, facts['traffic_bytes'], collectives(facts))
  speed = program.units / estimate.seconds
  return fit | {'bound_seconds': estimate._asdict(), 'limit': estimate.limit, f'{unit}s_per_second': speed}


def collectives(row: Mapping[str, Any]) -> dict[Collective, int]:
  """Return the bytes that one device moves in each kind of collective. `row` is a program's part of a report."""
  return {Collective(each['kind'], each['devices'], each['hosts']): each['bytes'] for each in row['collectives']}


def find_largest_batch(config: ConfigDict, topology: Topology) -> int | None:
  """Return the largest `train.batch_size` that fits into memory, with an error of up to 3%. None: no size fits."""
  config = config.copy_and_resolve_references().unlock()
  devices = topology.compile_devices()

  def needs(batch: int) -> int:
    config.train.batch_size = batch
    with topology.tracing():
      programs = trace_programs(config, devices)
    return _describe(programs.each[0], programs, topology, None, {})['peak_bytes']

  examples = len(plan_of(config).splits['train'])
  unit = batch_shares(make_mesh(devices, config.mesh)) * (config.train.accumulate or 1)
  return largest_batch(needs, topology.chip.usable_bytes, unit, config.train.batch_size, examples)


def check_fit(report: dict[str, Any], config: ConfigDict, topology: Topology) -> None:
  """Raise UserError if a program does not fit into memory. The message has the largest batch size that fits."""
  for row in report['programs']:
    if not row['fits']:
      over = (row['peak_bytes'] - report['memory_bytes']) / GIB
      if row is not report['programs'][0]:
        hint = 'set evaluate.batch_size to less'
      else:
        most = report['largest_batch'] if 'largest_batch' in report else find_largest_batch(config, topology)
        hint = f'the largest train.batch_size that fits is about {most}' if most else 'no train.batch_size fits'
      raise UserError(
        f'the {row["name"]} does not fit {topology.name}: it needs {row["peak_bytes"] / GIB:.2f} GiB a device, '
        f'{over:.2f} GiB too much; {hint}'
      )


def markdown(report: dict[str, Any]) -> str:
  """Return the report as a table in Markdown with a column for each program."""
  programs, units = report['programs'], f'{report["unit"]}s'
  gib = {'argument_bytes': 'arguments', 'temporary_bytes': 'temporaries', 'code_bytes': 'code'}
  lines: list[tuple[str, ...]] = [(f'{units} at once', *(f'{row[units]:,}' for row in programs))]

  def add(label: str, cell: Any) -> None:
    lines.append((label, *(cell(row) if 'traffic_bytes' in row else '' for row in programs)))

  add('parameters, GiB', lambda row: f'{report["parameter_bytes"] / GIB:.3f}')
  add("optimizer's state, GiB", lambda row: f'{report["optimizer_bytes"] / GIB:.3f}')
  for key, label in gib.items():
    add(f'{label}, GiB', lambda row, key=key: f'{row[key] / GIB:.3f}')
  memory = report['memory_bytes'] / GIB
  lines.append((f'peak of {memory:.2f} GiB', *(f'{row["peak_bytes"] / GIB:.3f}' for row in programs)))
  add('GFLOP', lambda row: f'{row["flops"] / 1e9:,.1f}')
  add("GFLOP, compiler's count", lambda row: f'{row["compiler_flops"] / 1e9:,.1f}' if row['compiler_flops'] else '')
  add('memory traffic, GB', lambda row: f'{row["traffic_bytes"] / 1e9:,.2f}')
  for among in sorted({among for row in programs if 'collectives' in row for among in collectives(row)}):
    label = f'{among.kind} among {among.devices}' + (f' on {among.hosts} hosts' if among.hosts > 1 else '')
    add(f'{label}, MB', lambda row, among=among: f'{collectives(row).get(among, 0) / 1e6:,.1f}')
  add('kernels', lambda row: ', '.join(f'{count} × {name}' for name, count in row['kernels'].items()) or 'XLA')
  for reason in ('compute', 'memory', 'network'):
    add(f'{reason}, ms (estimate)', lambda row, reason=reason: f'{1e3 * row["bound_seconds"][reason]:.2f}')
  add('limit', lambda row: row['limit'])
  add(f'{units}/s (estimate)', lambda row: f'{row[f"{units}_per_second"]:,.0f}')
  if 'largest_batch' in report:
    lines.append(('largest train.batch_size', f'{report["largest_batch"] or "none"}', *('' for _ in programs[1:])))
  lines.append(('compiled in, s', *(f'{row["compile_seconds"]:.0f}' for row in programs)))
  return table(('a device', *(row['name'] for row in programs)), lines)
