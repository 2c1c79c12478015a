"""Check pages by axe-core in headless Chromium, in light and dark, at 400 and 1,400 pixels: `make test-docs`.

python tests/accessibility.py site/index.html runs/c10/explain.html
"""

import html
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import axe_core_python

WIDTHS, SCHEMES = (400, 1400), ('light', 'dark')
GRAVE = ('serious', 'critical')
SCRIPT = (pathlib.Path(axe_core_python.__file__).parent / 'axe.min.js').read_text()
REPORT = """
addEventListener('load', () => axe.run().then(found => {
  const report = document.createElement('pre');
  report.id = 'axe-report';
  report.textContent = JSON.stringify(found.violations.map(v => ({
    rule: v.id, impact: v.impact, help: v.help, count: v.nodes.length, first: v.nodes[0].html.slice(0, 200)})));
  document.documentElement.replaceChildren(report);
}));
"""


def violations(page, width, scheme):
  """Return the violations that axe-core finds: rule, impact, help, count and first element of each.

  Args:
    page: an HTML file.
    width: width of the window in pixels.
    scheme: 'light' or 'dark'.
  """
  chromium = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
  if chromium is None:
    raise SystemExit('no Chromium: install it, for example by apt install chromium')
  text = page.read_text()
  assert '</body>' in text, f'{page} has no </body>'
  # Beside the page, so that its links to styles and pictures stay right.
  with tempfile.NamedTemporaryFile('w', suffix='.html', dir=page.parent, delete=False) as copy:
    copy.write(text.replace('</body>', f'<script>{SCRIPT}</script><script>{REPORT}</script></body>'))
  flags = ['--headless', '--no-sandbox', '--disable-gpu', '--allow-file-access-from-files', '--timeout=120000']
  flags += [f'--window-size={width},1000', f'--blink-settings=preferredColorScheme={0 if scheme == "dark" else 1}']
  try:
    done = subprocess.run(
      [chromium, *flags, '--virtual-time-budget=60000', '--dump-dom', f'file://{copy.name}'],
      capture_output=True,
      text=True,
      timeout=300,
      check=True,
    )
  finally:
    os.unlink(copy.name)
  report = re.search(r'<pre id="axe-report">(.*?)</pre>', done.stdout, re.DOTALL)
  assert report, f'axe-core gave no report of {page}'
  return json.loads(html.unescape(report[1]))


def main(pages):
  """Print all violations; return 1 if one is serious."""
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
