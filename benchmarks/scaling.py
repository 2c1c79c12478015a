"""Compilation of HyperBF in ViT's sizes on ImageNet, for many meshes of absent TPUs and GPUs: make scaling.

python -m benchmarks.scaling --platform=tpu      # needs requirements-tpu.txt
python -m benchmarks.scaling --platform=cuda     # needs requirements-gpu.txt

Programs are compiled only if they have changed, as in benchmarks.hardware. Records go to runs/scaling. Records in
results/scaling are used too.
"""

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from benchmarks.common import launch
from benchmarks.hardware import compile_known, platform_parser
from hbf.hardware.report import collectives
from hbf.markdown import table
from hbf.training.sharding import AXES
from hbf.training.workdir import write_json

RECORDS, FOLDER = pathlib.Path('results/scaling'), pathlib.Path('runs/scaling')
# Meshes as (data, fsdp, tensor), by platform and topology. ViT takes the first mesh too.
MESHES = {
  'tpu': {
    'v5e-16': ((16, 1, 1), (1, 16, 1), (4, 1, 4), (1, 4, 4)),
    'v5e-256': ((256, 1, 1), (1, 256, 1), (16, 16, 1), (64, 1, 4), (1, 64, 4)),
  },
  'cuda': {
    'h200-8': ((8, 1, 1), (1, 8, 1), (2, 1, 4), (1, 2, 4)),
    'h200-64': ((64, 1, 1), (1, 64, 1), (8, 8, 1), (16, 1, 4), (1, 16, 4)),
  },
}
# The batch of recipe plain. If it gives a device few images, also the usual larger one (Dosovitskiy et al. 2021).
BATCHES = {'v5e-16': (1024,), 'v5e-256': (4096, 1024), 'h200-8': (1024,), 'h200-64': (4096, 1024)}
# A TPU has memory for the inputs of the 24 blocks only, so their activations are recomputed.
SIZES = {'base': (), 'large': ('--config.model.remat=True',)}
# To compile faster: a scan over the blocks, and flips alone. Other augmentations take little time in a step.
SHORTER = ('--config.model.scan_layers=True', "--config.data.transforms=(('flip',),)", '--config.data.mix=()')
_GB = 1e9


class Case(NamedTuple):
  """A case to compile. `mesh` has the numbers of devices along data, fsdp and tensor."""

  topology: str
  model: str
  size: str
  batch: int
  mesh: tuple[int, int, int]
  form: str = ''  # implementation of stage 2, if it is not the default

  @property
  def file(self) -> str:
    """Name of the case's record."""
    model = '-'.join(filter(None, (self.model, self.form)))
    return f'{self.topology}-{model}-{self.size}-{self.batch}-{"x".join(map(str, self.mesh))}.json'

  @property
  def flags(self) -> list[str]:
    """Flags of the case's config."""
    axes = [f'--config.mesh.{axis}={size}' for axis, size in zip(AXES, self.mesh, strict=True)]
    model = f'--config=configs/imagenet.py:model={self.model},size={self.size}'
    form = [f'--config.model.stage2.implementation={self.form}'] if self.form else []
    return [model, f'--config.train.batch_size={self.batch}', *axes, *form, *SIZES[self.size], *SHORTER]


def cases(platform: str) -> Iterator[Case]:
  """Yield cases for each topology: every mesh at the first batch size, and the first mesh at every batch size.

  The first mesh at the first batch size is also yielded with ViT. The first topology of TPUs also has HyperBF with
  the Pallas kernel.
  """
  for size in SIZES:
    for topology, meshes in MESHES[platform].items():
      batch, *others = BATCHES[topology]
      yield Case(topology, 'hyperbf', size, batch, meshes[0])
      yield Case(topology, 'vit', size, batch, meshes[0])
      if topology == 'v5e-16':
        yield Case(topology, 'hyperbf', size, batch, meshes[0], 'pallas')
      for mesh in meshes[1:]:
        yield Case(topology, 'hyperbf', size, batch, mesh)
      for other in others:
        yield Case(topology, 'hyperbf', size, other, meshes[0])


def rows(folder: pathlib.Path, size: str) -> str:
  """Return the table of a folder's records for models of a size."""
  header = (
    ('topology', 'model', 'batch', 'data × fsdp × tensor', 'parameters and optimizer, GB', 'peak, GB')
    + ('all-reduce, GB', 'all-gather and permute, GB', 'compute, ms', 'memory, ms', 'network, ms', 'images/s')
  )  # fmt: skip
  found = [case for platform in MESHES for case in cases(platform) if case.size == size]
  lines = [
    _line(case, json.loads((folder / case.file).read_text())) for case in found if (folder / case.file).exists()
  ]
  return table(header, lines)


def _line(case: Case, record: Mapping[str, Any]) -> tuple[str, ...]:
  mesh = ' × '.join(map(str, case.mesh))
  about = (case.topology, ', '.join(filter(None, (case.model, case.form))), f'{case.batch:,}', mesh)
  if 'refused' in record:
    return (*about, record['refused'], *[''] * 7)
  train = record['programs'][0]
  state = f'{(record["parameter_bytes"] + record["optimizer_bytes"]) / _GB:.2f}'
  peak = f'{train["peak_bytes"] / _GB:.1f}'
  if 'collectives' not in train:
    return (*about, state, f'{peak}: too much', *[''] * 6)
  traffic = {'all-reduce': 0, 'all-gather': 0}
  for collective, size in collectives(train).items():
    # A reduce-scatter is the first half of an all-reduce.
    kind = 'all-reduce' if collective.kind in ('all-reduce', 'reduce-scatter') else 'all-gather'
    traffic[kind] += size
  times = [f'{1e3 * train["bound_seconds"][reason]:.1f}' for reason in ('compute', 'memory', 'network')]
  sizes = [f'{size / _GB:.2f}' for size in traffic.values()]
  return (*about, state, peak, *sizes, *times, f'{train["images_per_second"]:,.0f}')


def main() -> None:
  """Compile the new cases, one after another, and print the tables."""
  options = platform_parser(__doc__, FOLDER).parse_args()
  jax.config.update('jax_platforms', 'cpu')
  options.folder.mkdir(parents=True, exist_ok=True)
  for case in cases(options.platform):
    record = compile_known(case.flags, case.topology, case.file, (options.folder, RECORDS))
    write_json(options.folder / case.file, record)
    print(_line(case, record), flush=True)
  for size in SIZES:
    print(rows(options.folder, size))


if __name__ == '__main__':
  launch(main)
