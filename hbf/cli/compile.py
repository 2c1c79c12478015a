"""Compile a config's steps for absent hardware; report their memory and an estimate of their speed.

hbf compile --config=cifar10:model=hyperbf,recipe=memo --topology=v5e-16
hbf compile --config=cifar10:recipe=memo --config.model.dtype=bfloat16 --topology=h200-1 --json

Nothing runs. CIFAR, Tiny ImageNet and ImageNet need not be on disk, but your own images and all texts must be.
TPUs: v4-8, v5e-1, v5p-256, v6e-16, …, with "jax[tpu]" installed;
NVIDIA GPUs: a100-8, h100-8, h200-1, b200-64, …, with "jax[cuda12]" (each in an environment of its own).
"""

import json
import pathlib
from collections.abc import Sequence

from absl import flags

from hbf import cli

CONFIG = cli.define_config('digits')
TOPOLOGY = flags.DEFINE_string('topology', None, 'CHIP-NUMBER, such as v5e-16 or h200-1.', required=True)
LARGEST = flags.DEFINE_boolean(
  'largest_batch', False, 'Find the largest train.batch_size that fits, with an error of up to 3%.'
)
JSON = flags.DEFINE_boolean('json', False, 'Print one JSON object on stdout.')
TEXT = cli.define_path('text', "Folder for the compiled programs' text.", local=True)


def main(argv: Sequence[str]) -> int:
  """Compile the programs of the run and print their memory. Raise UserError if a device has less memory."""
  del argv
  import jax

  jax.config.update('jax_platforms', 'cpu')  # this process's own devices are not used
  from hbf.hardware.report import check_fit, describe_programs, find_largest_batch, markdown
  from hbf.hardware.topologies import parse_topology

  topology = parse_topology(TOPOLOGY.value)
  report = describe_programs(CONFIG.value, topology, pathlib.Path(TEXT.value) if TEXT.value else None)
  if LARGEST.value:
    report['largest_batch'] = find_largest_batch(CONFIG.value, topology)
  print(json.dumps(report) if JSON.value else markdown(report))
  check_fit(report, CONFIG.value, topology)
  return 0


if __name__ == '__main__':
  cli.run(main)
