"""Hooks of MkDocs.

- The notebooks of examples/ become pages of tutorials/.
- Links from pages to files outside docs/ lead to copies of these files in the site.
"""

import pathlib
import posixpath
import re

from latex2mathml.converter import convert
from mkdocs.structure.files import File
from nbconvert import MarkdownExporter

ROOT = pathlib.Path(__file__).parents[1]
LINK = re.compile(r'(!?)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)')
MATH = re.compile(r'\$\$(.+?)\$\$|\$([^$\n]+)\$', re.DOTALL)


def on_files(files, config):
  """Add the notebooks of examples/ and their pictures."""
  for notebook in sorted((ROOT / 'examples').glob('*.ipynb')):
    text, resources = MarkdownExporter().from_filename(str(notebook))
    for name, picture in resources['outputs'].items():
      text = text.replace(f'![png]({name})', f'![Picture that the code above draws]({notebook.stem}_{name})')
      files.append(File.generated(config, f'tutorials/{notebook.stem}_{name}', content=picture))
    text = text.replace('](../docs/', '](../').replace('.ipynb)', '.md)')
    files.append(File.generated(config, f'tutorials/{notebook.stem}.md', content=_without_latex(text)))
  return files


def _without_latex(text):
  """Replace formulas by MathML, which a browser shows without a script. Code keeps its dollars."""
  parts = re.split(r'(```.*?```)', text, flags=re.DOTALL)
  for i in range(0, len(parts), 2):
    # A line that starts with a tag would be a block of its own.
    parts[i] = re.sub(r'(?<=\S)\n(?=\$[^$])', ' ', parts[i])
    parts[i] = MATH.sub(lambda m: convert(m[1] or m[2], display='block' if m[1] else 'inline'), parts[i])
  return ''.join(parts)


def on_page_markdown(markdown, page, config, files):
  """Copy every linked file outside docs/ into the site; a link to a folder becomes the folder's name."""

  def replace(match):
    image, text, path, anchor = match[1], match[2], match[3], match[4] or ''
    inside = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), path))
    if not inside.startswith('../'):
      return match[0]
    source = ROOT / inside.removeprefix('../')
    if not source.exists():
      raise FileNotFoundError(f'{page.file.src_uri} links to {source}, which is not there')
    if source.is_dir():
      return f'{text} (`{source.relative_to(ROOT)}`)'
    # Text files open in a browser with this ending; others keep theirs.
    name = f'files/{source.relative_to(ROOT)}' + ('.txt' if source.suffix in ('.py', '.md', '') else '')
    if not files.get_file_from_path(name):
      files.append(File.generated(config, name, content=source.read_bytes()))
    there = posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or '.')
    return f'{image}[{text}]({there}{"" if source.suffix == ".md" else anchor})'

  return LINK.sub(replace, markdown)
