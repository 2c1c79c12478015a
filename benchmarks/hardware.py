"""Compilation of the models for absent hardware, with the resources that they need: make compile.

python -m benchmarks.hardware --platform=tpu      # needs requirements-tpu.txt
python -m benchmarks.hardware --platform=cuda     # needs requirements-gpu.txt

A program is compiled again only if it, the compiler or another version has changed. If a program cannot be compiled,
the record has the reason. Records, one file for each config and topology, go to runs/hardware. Records in
results/hardware are used too.
"""

import argparse
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from benchmarks.common import launch
from hbf.config.command_line import read_config
from hbf.errors import UserError
from hbf.hardware.report import describe_programs
from hbf.hardware.topologies import parse_topology
from hbf.markdown import table
from hbf.nn.registry import MODELS
from hbf.training.workdir import write_json

RECORDS, FOLDER = pathlib.Path('results/hardware'), pathlib.Path('runs/hardware')
TOPOLOGIES = {'tpu': ('v5e-1', 'v5e-16'), 'cuda': ('h200-1', 'h200-8')}
# By platform: the two models that the project compares, and HyperBF with its fused kernel, which is for TPUs.
COMPARED = {
  'tpu': (('hyperbf', 'xla'), ('vit', ''), ('hyperbf', 'pallas')),
  'cuda': (('hyperbf', 'xla'), ('vit', '')),
}
_MB, _GB = 1e6, 1e9


def cases(platform: str) -> Iterator[tuple[str, str, str, str, str]]:
  """Yield the cases, each as (topology, model, implementation of stage 2, recipe, type)."""
  (one, many), compared = TOPOLOGIES[platform], COMPARED[platform]
  for model, form in compared:
    yield one, model, form, 'memo', 'bfloat16'
  for model, form in compared:
    yield many, model, form, 'memo', 'bfloat16'
  for model in MODELS:
    if model not in dict(compared):
      yield one, model, '', 'memo', 'bfloat16'
  for recipe, dtype in (('small', 'bfloat16'), ('memo', 'float32')):
    for model, form in compared:
      yield one, model, form, recipe, dtype


def compile_case(
  folder: pathlib.Path, topology: str, model: str, form: str, recipe: str, dtype: str
) -> dict[str, Any]:
  """Return the record of a case. Compile the case unless a record in `folder` or RECORDS is still valid.

  `form` is the implementation of stage 2.
  """
  flags = [f'--config=configs/cifar10.py:model={model},recipe={recipe}', f'--config.model.dtype={dtype}']
  flags += [f'--config.model.stage2.implementation={form}'] if form else []
  return compile_known(flags, topology, name_of(topology, model, form, recipe, dtype), (folder, RECORDS))


def compile_known(flags: Sequence[str], topology: str, file: str, folders: Sequence[pathlib.Path]) -> dict[str, Any]:
  """Return the record of a config.

  Args:
    flags: flags of the config.
    topology: name of the topology to compile for.
    file: name of the record. Programs that a record of this name in `folders` has are not compiled again.
    folders: folders of records.
  """
  paths = [folder / file for folder in folders]
  records = (json.loads(path.read_text()) for path in paths if path.exists())
  known = [record for record in records if not record.get('refused')]
  config = read_config(flags)
  try:
    return describe_programs(config, parse_topology(topology), known=known)
  except UserError as error:
    about = {'topology': topology, 'model': config.model.name, 'recipe': config.recipe, 'dtype': config.model.dtype}
    return about | {
      'form': (config.model.stage2 or {}).get('implementation', ''),
      'refused': str(error),
      'programs': [],
    }


def rows(folder: pathlib.Path) -> str:
  """Return the table of all records in a folder."""
  header = (
    ('topology', 'model', 'recipe', 'type', 'train: GFLOP', 'traffic, GB', 'temporaries, MB', 'peak, MB')
    + ('estimate, ms', 'limit', 'images/s', 'evaluation: peak, MB', 'images/s', 'kernels')
  )  # fmt: skip
  lines = []
  for platform in TOPOLOGIES:
    for case in cases(platform):
      path = folder / name_of(*case)
      if path.exists():
        lines.append(_line(json.loads(path.read_text())))
  return table(header, lines)


def name_of(topology: str, model: str, form: str, recipe: str, dtype: str) -> str:
  """Return the name of a case's file."""
  return '-'.join(filter(None, (topology, model, form if form != 'xla' else '', recipe, dtype))) + '.json'


def _line(record: dict[str, Any]) -> tuple[str, ...]:
  model = record['model'] + (', pallas' if record['form'] == 'pallas' else '')
  about = (record['topology'], model, record['recipe'], record['dtype'])
  if record.get('refused'):
    return (*about, record['refused'], *[''] * 9)
  train, evaluation = record['programs']
  peaks = [f'{program["peak_bytes"] / _MB:,.0f}' for program in (train, evaluation)]
  operations = f'{train["flops"] / _GB:,.1f}'
  speed = f'{evaluation["images_per_second"]:,.0f}' if 'limit' in evaluation else 'too much memory'
  if 'limit' not in train:  # too large to compile
    return (*about, operations, '', '', f'{peaks[0]}: too much', '', '', '', peaks[1], speed, '')
  return (
    *about,
    operations,
    f'{train["traffic_bytes"] / _GB:,.2f}',
    f'{train["temporary_bytes"] / _MB:,.0f}',
    peaks[0],
    f'{1e3 * max(train["bound_seconds"].values()):.2f}',
    train['limit'],
    f'{train["images_per_second"]:,.0f}',
    peaks[1],
    speed,
    ', '.join(f'{count} {name}' for name, count in train['kernels'].items()),
  )


def platform_parser(description: str | None, folder: pathlib.Path) -> argparse.ArgumentParser:
  """Return a parser with the flags of benchmarks that compile for absent hardware. `folder` is for their records."""
  flags = argparse.ArgumentParser(description=(description or '').splitlines()[0])
  flags.add_argument('--platform', choices=TOPOLOGIES, required=True)
  flags.add_argument('--folder', type=pathlib.Path, default=folder)
  return flags


def main() -> None:
  """Compile the new cases, one after another, and print the table."""
  options = platform_parser(__doc__, FOLDER).parse_args()
  jax.config.update('jax_platforms', 'cpu')
  options.folder.mkdir(parents=True, exist_ok=True)
  for case in cases(options.platform):
    record = compile_case(options.folder, *case)
    write_json(options.folder / name_of(*case), record)
    print(_line(record), flush=True)
  print(rows(options.folder))


if __name__ == '__main__':
  launch(main)
