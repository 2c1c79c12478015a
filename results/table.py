"""Prints the README's results from the runs in this folder: python results/table.py."""

import collections
import json
import pathlib
import statistics

ROOT = pathlib.Path(__file__).parent
HEADER = """\
| data | recipe | model | parameters | seeds | test accuracy, % | NLL | ECE, % | device |
|---|---|---|---|---|---|---|---|---|"""


def table() -> str:
  """A row for every data set, recipe and model: means over its seeds, and each seed's accuracy."""
  runs = collections.defaultdict(list)
  for path in sorted(ROOT.glob('*/result.json')):
    result = json.loads(path.read_text())
    runs[result['dataset'], result['recipe'], result['model'], result['epochs']].append(result)
  rows = [HEADER]
  for (dataset, recipe, model, epochs), results in runs.items():
    mean = {key: statistics.fmean(r[key] for r in results) for key in ('accuracy', 'nll', 'ece')}
    each = ', '.join(f'{r["accuracy"]:.2f}' for r in results)
    cells = (
      dataset,
      f'{recipe}, {epochs:g} epochs',
      model,
      f'{results[0]["params"]:,}',
      ', '.join(str(r['seed']) for r in results),
      f'**{mean["accuracy"]:.2f}** ({each})',
      f'{mean["nll"]:.3f}',
      f'{mean["ece"]:.1f}',
      results[0]['device'],
    )
    rows.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join(rows)


if __name__ == '__main__':
  print(table())
