"""Pages in a real browser, where one is installed."""

import html
import json
import re
import shutil
import subprocess

import pytest

from dgr2_jax.evaluation import report
from tests.evaluation import test_report

BROWSER = next(filter(None, map(shutil.which, (
    'chromium', 'chromium-browser', 'google-chrome'))), None)
WIDTHS = (390, 1280)
# Counts errors from the start and tells the frame around it when done. Texts
# are cut where they stand out of their figure.
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
  parent.postMessage({width: innerWidth, cut, errors,
    scrolled: document.documentElement.scrollWidth,
    figures: svgs.filter(s => s.clientHeight > 50).length}, '*');
});</script>'''
_FRAMES = '''<!DOCTYPE html><title>none</title><script>const found = [];
addEventListener('message', e => {
  found.push(e.data); document.title = JSON.stringify(found); });
</script>''' + ''.join(
    f'<iframe src="probed.html" style="border:0;width:{width}px;height:900px">'
    '</iframe>' for width in WIDTHS)


@pytest.mark.skipif(BROWSER is None, reason='no Chromium is installed')
def test_a_report_fits_phones_and_screens(tmp_path):
  lines = test_report._metrics_lines()  # pylint: disable=protected-access
  (tmp_path / 'metrics.jsonl').write_text('\n'.join(lines))
  report.write(tmp_path, test_report.make_content())
  page = (tmp_path / 'report.html').read_text(encoding='utf-8')
  (tmp_path / 'probed.html').write_text(
      page.replace('<head>', f'<head>{_PROBE}', 1), encoding='utf-8')
  (tmp_path / 'frames.html').write_text(_FRAMES)
  dom = subprocess.run(
      [BROWSER, '--headless', '--no-sandbox', '--disable-gpu', '--dump-dom',
       '--hide-scrollbars', f'--user-data-dir={tmp_path / "profile"}',
       '--virtual-time-budget=20000', (tmp_path / 'frames.html').as_uri()],
      capture_output=True, text=True, check=True, timeout=300).stdout
  title = html.unescape(re.search('<title>(.*?)</title>', dom)[1])
  assert sorted(json.loads(title), key=lambda frame: frame['width']) == [
      {'width': width, 'scrolled': width, 'errors': 0, 'cut': [],
       'figures': len(test_report.PANELS)} for width in WIDTHS]
