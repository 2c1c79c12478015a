"""Tests that tables are Markdown, complete, and aligned."""

import json
import re

import pytest

from benchmarks.common import measured_on, report
from hbf.markdown import cell, printable, table


def test_columns_stand_in_line_and_cells_are_whole():
  rows = [('a', '1,234.5'), ('σ² = √D', '')]
  lines = table(('name', 'n'), rows).splitlines()
  assert len({len(line) for line in lines}) == 1
  assert [tuple(part.strip() for part in line.strip('|').split('|')) for line in (lines[0], *lines[2:])] == [
    ('name', 'n'),
    *rows,
  ]
  assert re.fullmatch(r'\|( -{3,} \|)+', lines[1])


def test_a_bar_in_a_cell_is_no_end_of_it():
  text = table(('a|b', 'n'), [('|x − t|', '1\n2')])
  assert [re.split(r'(?<!\\)\|', line)[1:-1] for line in text.splitlines()] == [
    [r' a\|b      ', ' n   '],
    [' --------- ', ' --- '],
    [r' \|x − t\| ', ' 1 2 '],
  ]


def test_bytes_that_are_not_utf8_can_be_printed():
  shown = (printable('caf\udce9 ä'), table(('image',), [('caf\udce9 ä',)]).splitlines()[2])
  assert [text.encode().decode() for text in shown] == [r'caf\udce9 ä', r'| caf\udce9 ä |']


@pytest.mark.parametrize(
  ('value', 'shown'),
  [
    (1234567, '1,234,567'),
    (0.98765, '0.988'),
    (40.0, '40'),
    (999.7, '1,000'),
    (4321.6, '4,322'),
    ('1.0 (0.9)', '1.0 (0.9)'),
  ],
)
def test_a_cell_has_what_matters_of_a_number(value, shown):
  assert cell(value) == shown


@pytest.mark.parametrize('out', [['--out', '/a/b'], ['--out=/a/b']])
@pytest.mark.parametrize('clone', ['--nanogpt=/a/nanoGPT', '--nanogpt=nanoGPT'])
def test_a_record_names_no_place_on_the_machine(monkeypatch, out, clone):
  monkeypatch.setattr('sys.argv', ['/x/benchmarks/serve.py', *out, '--clients', '1,8', clone])
  assert measured_on()['command'] == 'python -m benchmarks.serve --clients 1,8 --nanogpt=nanoGPT'


def test_benchmarks_print_every_number_in_80_columns(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv('COLUMNS', '80')
  row = {f'a column called {i}': f'{i}.98 (0.97–1.02)' for i in range(9)} | {'images/s': 123.456}
  report('some', 'Title', [row], tmp_path / 'some.json')
  shown = capsys.readouterr().out
  assert all(value in shown for value in [*list(row)[:9], *list(row.values())[:9], '123'])
  assert json.loads((tmp_path / 'some.json').read_text())['rows'] == [row]
