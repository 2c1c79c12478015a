"""Check pages by axe-core in headless Chromium, in light and dark, at 400 and 1,400 pixels: `make test-docs`.

python -m tests.accessibility site/index.html runs/c10/explain.html
"""

import json
import pathlib
import sys
import tempfile

import axe_core_python

from tests.browser import CHROMIUM, title_of

WIDTHS, SCHEMES = (400, 1400), ('light', 'dark')
GRAVE = ('serious', 'critical')
SCRIPT = (pathlib.Path(axe_core_python.__file__).parent / 'axe.min.js').read_text()
REPORT = """
addEventListener('load', () => axe.run().then(found => {
  document.title = JSON.stringify(found.violations.map(v => ({
    rule: v.id, impact: v.impact, help: v.help, count: v.nodes.length, first: v.nodes[0].html.slice(0, 200)})));
}));
"""


def violations(page, width, scheme):
  """Return the violations that axe-core finds, each as a dict of rule, impact, help, count and first element.

  Args:
    page: an HTML file.
    width: width of the page in pixels.
    scheme: 'light' or 'dark'.
  """
  text = page.read_text().replace('<head>', f'<head><base href="{page.as_uri()}">', 1)
  with tempfile.TemporaryDirectory() as folder:
    return json.loads(title_of(text, SCRIPT + REPORT, folder, width, scheme, seconds=60))


def main(pages):
  """Print the violations of all pages. Return 1 if one of them is serious, else 0."""
  if CHROMIUM is None:
    raise SystemExit('no Chromium: install it, for example by apt install chromium')
  grave = 0
  for page in map(pathlib.Path, pages):
    for width in WIDTHS:
      for scheme in SCHEMES:
        found = violations(page.resolve(), width, scheme)
        grave += sum(violation['impact'] in GRAVE for violation in found)
        print(f'{page}, {width} pixels, {scheme}: {len(found)} violations')
        for violation in found:
          print(f'  {violation["impact"]}: {violation["rule"]}, {violation["count"]} times: {violation["help"]}')
          print(f'    {violation["first"]}')
  return int(grave > 0)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
