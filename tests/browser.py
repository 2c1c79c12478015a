"""Pages in headless Chromium."""

import html
import pathlib
import re
import shutil
import subprocess

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')


def title_of(page, script, folder, width, scheme='light', seconds=5):
  """Open a page at a width, run a script in its head, and return the title that the script gives to the document.

  Args:
    page: the page's HTML.
    script: JavaScript that sets `document.title`.
    folder: an empty folder for the page and the browser's files.
    width: pixels. A window has at least 500, so the page stands in a frame of this width.
    scheme: 'light' or 'dark'.
    seconds: time of the page's own clock that the script may take.
  """
  folder = pathlib.Path(folder)
  (folder / 'page.html').write_text(page.replace('<head>', f'<head><script>{script}</script>', 1))
  frame = folder / 'frame.html'
  frame.write_text(
    f'<iframe src="page.html" style="width: {width}px; height: 800px; border: 0"></iframe><script>'
    'setInterval(() => document.title = frames[0].document.title, 50)</script>'
  )
  options = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-background-networking']
  options += ['--allow-file-access-from-files', f'--user-data-dir={folder / "profile"}']
  options += [f'--virtual-time-budget={1000 * seconds}', f'--window-size={width + 40},900']
  options += [f'--blink-settings=preferredColorScheme={0 if scheme == "dark" else 1}']
  done = subprocess.run(
    [CHROMIUM, *options, '--dump-dom', f'file://{frame}'], capture_output=True, text=True, timeout=300
  )
  return html.unescape(re.search('<title>(.*)</title>', done.stdout)[1])
