"""Tests of records of compiled programs: every case is there, and the counts equal the compiler's."""

import json
import math
import pathlib

import pytest

from benchmarks import hardware, scaling
from benchmarks.hardware import TOPOLOGIES, cases, compile_case, name_of
from hbf.errors import UserError
from hbf.hardware.report import collectives

FOLDER = pathlib.Path(__file__).parents[2] / 'results' / 'hardware'
# One TPU chip's records were of older code and are gone; `make compile` makes them anew.
CASES = [case for platform in TOPOLOGIES for case in cases(platform) if case[0] != 'v5e-1']
SCALED = [case for platform in scaling.MESHES for case in scaling.cases(platform)]


@pytest.mark.parametrize('case', CASES, ids=lambda case: name_of(*case))
def test_a_case_is_recorded_and_adds_up(case):
  record = json.loads((FOLDER / name_of(*case)).read_text())
  assert [record[key] for key in ('topology', 'model', 'recipe', 'dtype')] == [case[0], case[1], *case[3:]]
  assert [row['name'] for row in record['programs']] == ['train step', 'evaluation step']
  assert record['commit'] and not record['commit'].endswith('dirty')
  for row in record['programs']:
    assert row['fits'] and row['peak_bytes'] == row['needed_bytes'] + row['held_bytes']
    assert row['images_per_second'] == pytest.approx(row['images'] / max(row['bound_seconds'].values()))
    if row['compiler_flops'] and record['model'] != 'unified':  # docs/research/hardware.md says why not
      assert row['flops'] == pytest.approx(row['compiler_flops'], rel=0.05)


def test_no_case_on_gpus_has_a_kernel_for_tpus():
  assert {case[0].split('-')[0] for case in CASES if case[2] == 'pallas'} == {'v5e'}
  assert {case.topology for case in SCALED if case.form} == {'v5e-16'}


def test_nothing_else_is_recorded():
  assert {path.name for path in FOLDER.iterdir()} == {name_of(*case) for case in CASES}
  assert {path.name for path in scaling.RECORDS.iterdir()} == {case.file for case in SCALED}


@pytest.mark.parametrize('case', SCALED, ids=lambda case: case.file)
def test_a_mesh_is_recorded_with_its_shares(case):
  record = json.loads((scaling.RECORDS / case.file).read_text())
  assert [record[key] for key in ('topology', 'model', 'dataset')] == [case.topology, case.model, 'imagenet2012']
  assert record['devices'] == math.prod(case.mesh) and not record['commit'].endswith('dirty')
  train = record['programs'][0]
  assert train['images'] == case.batch
  _, fsdp, tensor = case.mesh
  whole = 4 * record['params']
  assert whole / fsdp / tensor <= record['parameter_bytes'] <= 1.1 * whole / fsdp / tensor + 1e7  # vectors are whole
  if train['fits'] and case.mesh[0] > 1:  # who has other images has other gradients, and a share of each matrix
    summed = [size for among, size in collectives(train).items() if among.kind in ('all-reduce', 'reduce-scatter')]
    assert sum(summed) >= 2 * record['params'] / fsdp / tensor


def test_a_case_that_was_refused_is_tried_again(tmp_path, monkeypatch):
  """The record of a refused case has the reason and no program."""
  case, given = CASES[0], []

  def refuse(config, topology, known):
    given.append(known)
    raise UserError('not this one')

  monkeypatch.setattr(hardware, 'describe_programs', refuse)
  monkeypatch.setattr(hardware, 'RECORDS', tmp_path / 'none')
  for _ in range(2):
    record = compile_case(tmp_path, *case)
    (tmp_path / name_of(*case)).write_text(json.dumps(record))
  assert record['refused'] == 'not this one' and given == [[], []]
