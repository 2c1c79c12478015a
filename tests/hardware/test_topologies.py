"""Tests of the names of topologies. Nothing is compiled here."""

import importlib.util
import re

import pytest

from hbf.errors import UserError
from hbf.hardware.chips import CHIPS, GpuChip, target_config
from hbf.hardware.topologies import parse_topology


@pytest.mark.parametrize(
  ('name', 'shape', 'hosts'),
  [
    # Of MaxText's table, accelerator_to_spec_map.py; hosts of one slice in Cloud TPU's pages.
    ('v4-8', (2, 2, 1), 1),
    ('v4-16', (2, 2, 2), 2),
    ('v4-32', (2, 2, 4), 4),
    ('v4-64', (2, 4, 4), 8),
    ('v4-128', (4, 4, 4), 16),
    ('v4-4096', (8, 16, 16), 512),
    ('v5p-8', (2, 2, 1), 1),
    ('v5p-256', (4, 4, 8), 32),
    ('v5p-512', (4, 8, 8), 64),
    ('v5p-2048', (8, 8, 16), 256),
    ('v5p-8192', (16, 16, 16), 1024),
    ('v5e-1', (1, 1), 1),
    ('v5e-4', (2, 2), 1),
    ('v5e-8', (2, 4), 1),
    ('v5e-16', (4, 4), 4),
    ('v5e-128', (8, 16), 32),
    ('v6e-32', (4, 8), 8),
    ('v6e-256', (16, 16), 64),
    # GPUs: hosts and GPUs a host.
    ('h200-1', (1, 1), 1),
    ('a100-3', (1, 3), 1),
    ('h100-8', (1, 8), 1),
    ('b200-64', (8, 8), 8),
  ],
)
def test_a_name_stands_for_devices_in_a_shape(name, shape, hosts):
  topology = parse_topology(name)
  devices = 1
  for side in shape:
    devices *= side
  assert topology.name == name
  assert topology.chip.name == name.split('-')[0]
  assert (topology.shape, topology.devices, topology.hosts) == (shape, devices, hosts)


@pytest.mark.parametrize(
  ('name', 'said'),
  [
    ('v5e', 'expected a chip and a number, such as v5e-16'),
    ('v5e-', 'expected a chip and a number'),
    ('v5e-0', 'expected a chip and a number'),
    ('v5e-four', 'expected a chip and a number'),
    ('-8', 'expected a chip and a number'),
    ('v5e-4x4', 'expected a chip and a number'),
    ('h20-8', "unknown chip 'h20': did you mean 'h200'? known: a100, b200, h100, h200, v4, v5e, v5p, v6e"),
    ('tpu-8', "unknown chip 'tpu': known: a100"),
  ],
)
def test_what_is_no_topology_is_refused_in_a_line(name, said):
  with pytest.raises(UserError) as error:
    parse_topology(name)
  assert said in str(error.value)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  ('name', 'nearest'),
  [
    ('v5e-2', ['v5e-1', 'v5e-4']),
    ('v5e-12', ['v5e-8', 'v5e-16']),
    ('v5e-512', ['v5e-256']),
    ('v4-4', ['v4-8']),
    ('v5p-384', ['v5p-256', 'v5p-512']),
    ('v5p-16384', ['v5p-8192']),
    ('h100-9', ['h100-8', 'h100-16']),
    ('h100-12', ['h100-8', 'h100-16']),
    ('b200-63', ['b200-56', 'b200-64']),
  ],
)
def test_a_number_that_a_chip_does_not_come_in_is_refused_with_the_nearest(name, nearest):
  with pytest.raises(UserError, match=f"^topology '{name}' [^\n]*[.] Use {' or '.join(nearest)}$"):
    parse_topology(name)
  assert [parse_topology(known).name for known in nearest] == nearest


@pytest.mark.parametrize(
  ('name', 'module', 'requirement'),
  [('v5e-4', 'libtpu', 'jax[tpu]'), ('h200-1', 'jax_cuda12_plugin', 'jax[cuda12]')],
)
def test_a_compiler_that_is_not_installed_is_named_with_what_installs_it(monkeypatch, name, module, requirement):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda module: None)
  with pytest.raises(UserError, match=rf'^{name} needs .*{module}.*pip install "{re.escape(requirement)}"'):
    parse_topology(name).compile_devices()


def test_rates_fall_with_precision():
  for chip in CHIPS.values():
    assert chip.flops['bfloat16'] >= chip.flops['float32'] > chip.flops['highest'] > 1e12, chip.name
    assert chip.network < chip.memory_bandwidth, chip.name


@pytest.mark.parametrize('chip', [chip for chip in CHIPS.values() if isinstance(chip, GpuChip)], ids=lambda c: c.name)
def test_a_target_describes_the_chip(chip):
  text = target_config(chip)
  fields = dict(re.findall(r'(\w+): (\S+)', text))
  assert text.count('{') == text.count('}')
  assert int(fields['device_memory_size']) == chip.memory_bytes
  assert int(fields['memory_bandwidth']) == chip.memory_bandwidth
  assert int(fields['core_count']) == chip.cores
  # A core's FPU multiplies and adds in each clock: the data sheet's rate in float32, to a tenth.
  rate = 2e9 * int(fields['core_count']) * int(fields['fpus_per_core']) * float(fields['clock_rate_ghz'])
  assert rate == pytest.approx(chip.flops['highest'], rel=0.1)
  # A block has to leave a KiB of its core's shared memory to CUDA.
  assert int(fields['shared_memory_per_block_optin']) == int(fields['shared_memory_per_core']) - 1024
