"""Pages in a real browser, where one is installed."""

import html
import json
import pathlib
import re
import shutil
import subprocess

import pytest

from dgr2_jax.evaluation import report
from dgr2_jax.tools import compare
from tests.evaluation import test_report

ROOT = pathlib.Path(__file__).parents[2]
PUBLISHED = {
    name: ROOT / 'experiments' / name / 'seed0' / 'report.html'
    for name in ('quickstart', 'beauty_small')}
BROWSER = next(filter(None, map(shutil.which, (
    'chromium', 'chromium-browser', 'google-chrome'))), None)
WIDTHS = (390, 1280)
# Counts errors, also what does not load, and tells the frame around it when
# done. Texts are cut where they stand out of their figure.
_PROBE = '''<script>let errors = 0;
addEventListener('error', () => errors++, true);
addEventListener('load', () => {
  document.querySelectorAll('details').forEach(d => d.open = true);
  const svgs = [...document.querySelectorAll('figure > svg')];
  const cut = svgs.flatMap(svg => {
    const frame = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text')].filter(text => {
      const box = text.getBoundingClientRect();
      return box.left < frame.left - 1 || box.right > frame.right + 1;
    }).map(text => text.textContent);
  });
  parent.postMessage({page: location.pathname.split('/').pop(),
    width: innerWidth, cut, errors,
    scrolled: document.documentElement.scrollWidth,
    figures: svgs.filter(s => s.clientHeight > 50).length}, '*');
});</script>'''
# What the browser has to say of it is one line each in its log.
_BROKEN = '''<script>console.error('error'); console.warn('warning');
Promise.reject('rejection'); none();</script><img src="none.png">'''


def _frames(pages):
  return '''<!DOCTYPE html><title>none</title><script>const found = [];
addEventListener('message', e => {
  found.push(e.data); document.title = JSON.stringify(found); });
</script>''' + ''.join(
    f'<iframe src="{page}" style="border:0;width:{width}px;height:900px">'
    '</iframe>' for page in pages for width in WIDTHS)


def _browse(folder, pages):
  """What the probes found, by page and width, and the console by page."""
  for name, text in pages.items():
    assert '<head>' in text
    (folder / name).write_text(
        text.replace('<head>', f'<head>{_PROBE}', 1), encoding='utf-8')
  (folder / 'frames.html').write_text(_frames(pages))
  told = subprocess.run(
      [BROWSER, '--headless', '--no-sandbox', '--disable-gpu', '--dump-dom',
       '--hide-scrollbars', '--enable-logging=stderr',
       f'--user-data-dir={folder / "profile"}',
       '--virtual-time-budget=20000', (folder / 'frames.html').as_uri()],
      capture_output=True, text=True, check=True, timeout=300)
  found = json.loads(html.unescape(
      re.search('<title>(.*?)</title>', told.stdout)[1]))
  console = [(source.rpartition('/')[2], said) for said, source in re.findall(
      r'CONSOLE[^]]*\] "(.*?)", source: (\S*) ', told.stderr, re.S)]
  return {(f.pop('page'), f.pop('width')): f for f in found}, console


@pytest.mark.skipif(BROWSER is None, reason='no Chromium is installed')
def test_pages_fit_phones_and_screens_without_errors(tmp_path):
  lines = test_report._metrics_lines()  # pylint: disable=protected-access
  (tmp_path / 'metrics.jsonl').write_text('\n'.join(lines))
  report.write(tmp_path, test_report.make_content())
  compare.main([*(str(path.parent) for path in PUBLISHED.values()),
                f'--output={tmp_path}'])
  pages = {f'{name}.html': path.read_text(encoding='utf-8')
           for name, path in PUBLISHED.items()}
  for name in ('report.html', 'compare.html'):
    pages[name] = (tmp_path / name).read_text(encoding='utf-8')
  found, console = _browse(
      tmp_path, {**pages, 'broken.html': f'<head></head>{_BROKEN}'})
  for width in WIDTHS:  # the probe sees errors
    assert found.pop(('broken.html', width))['errors'] == 2
  said = [what for page, what in console if page == 'broken.html']
  assert [sum(word in line for line in said) for word in (
      'error', 'warning', 'rejection', 'none is not defined')] == [2] * 4
  assert {page for page, _ in console} == {'broken.html'}
  assert found == {
      (name, width): {'scrolled': width, 'errors': 0, 'cut': [],
                      'figures': text.count('<svg')}
      for name, text in pages.items() for width in WIDTHS}
  assert pages['report.html'].count('<svg') == len(test_report.PANELS)
