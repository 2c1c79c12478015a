"""What was compiled for hardware that isn't here: every case is recorded, and our counts are the compiler's."""

import json
import pathlib

import pytest

from benchmarks import hardware
from benchmarks.hardware import TOPOLOGIES, cases, compile_case, name_of
from hbf.errors import UserError

FOLDER = pathlib.Path(__file__).parents[2] / 'results' / 'hardware'
CASES = [case for platform in TOPOLOGIES for case in cases(platform)]


@pytest.mark.parametrize('case', CASES, ids=lambda case: name_of(*case))
def test_a_case_is_recorded_and_adds_up(case):
  record = json.loads((FOLDER / name_of(*case)).read_text())
  assert [record[key] for key in ('topology', 'model', 'recipe', 'dtype')] == [case[0], case[1], *case[3:]]
  assert [row['name'] for row in record['programs']] == ['train step', 'evaluation step']
  assert record['commit'] and not record['commit'].endswith('dirty')
  for row in record['programs']:
    assert row['fits'] and row['peak_bytes'] == row['needed_bytes'] + row['held_bytes']
    assert row['images_per_second'] == pytest.approx(row['images'] / max(row['bound_seconds'].values()))
    if row['compiler_flops'] and record['model'] != 'unified':  # docs/hardware.md says why not
      assert row['flops'] == pytest.approx(row['compiler_flops'], rel=0.05)


def test_nothing_else_is_recorded():
  assert {path.name for path in FOLDER.iterdir()} == {name_of(*case) for case in CASES}


def test_a_case_that_was_refused_is_tried_again(tmp_path, monkeypatch):
  """Its record knows of no program."""
  case, given = CASES[0], []

  def refuse(config, topology, known):
    given.append(known)
    raise UserError('not this one')

  monkeypatch.setattr(hardware, 'describe_programs', refuse)
  monkeypatch.setattr(hardware, 'RECORDS', tmp_path / 'none')
  for _ in range(2):
    record = compile_case(tmp_path, *case)
    (tmp_path / name_of(*case)).write_text(json.dumps(record))
  assert record['refused'] == 'not this one' and given == [None, None]
