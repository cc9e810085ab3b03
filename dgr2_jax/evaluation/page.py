"""report.html: one page that needs nothing but itself.

Styles and figures are inline, so the file can be mailed. Wide tables scroll in
their own box, never the page; colours follow the reader's scheme. Every text
that came from data goes through `html.escape`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import html
from typing import Any

from dgr2_jax.evaluation import examples as examples_lib
from dgr2_jax.evaluation import panels as panels_lib
from dgr2_jax.evaluation import tables

# Later steps share the last colour.
_RAMP = panels_lib.ramp(10)

_CSS = '''
*{box-sizing:border-box}
body{margin:0 auto;padding:1.2rem 1rem 4rem;max-width:80rem;color:var(--ink);
 background:var(--surface);font:1rem/1.55 system-ui,sans-serif;
 overflow-wrap:break-word}
h1{font-size:1.6rem;line-height:1.25;margin:.4rem 0 1rem}
h2{font-size:1.2rem;margin:2.6rem 0 .6rem;padding-top:.8rem;
 border-top:1px solid var(--grid)}
h3{font-size:1rem;margin:1.6rem 0 .5rem}
p,ul,ol{margin:.5rem 0}
p,ul,ol,details,.panels{max-width:64rem}
ul,ol{padding-left:1.4rem}
small,.note{color:var(--muted);font-size:.84rem}
.note{margin:.3rem 0 1rem;max-width:46rem}
nav{display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.92rem}
a{color:var(--series-1)}
.box{overflow-x:auto;margin:.6rem 0}
table{border-collapse:separate;border-spacing:0;font-size:.9rem;
 font-variant-numeric:tabular-nums}
th,td{padding:.3125rem .6rem;text-align:right;vertical-align:top;
 line-height:1.25rem;border-bottom:1px solid var(--grid);white-space:nowrap}
th{font-weight:600;vertical-align:bottom;color:var(--muted)}
th.text,td.text{text-align:left}
td small{display:block;line-height:1rem}
td:first-child,th:first-child{position:sticky;left:0;
 background:var(--surface)}
.facts td{white-space:normal;min-width:8rem;overflow-wrap:anywhere}
.facts td:first-child{color:var(--muted)}
.orders table{width:100%;table-layout:fixed}
.orders th:first-child,.orders td:first-child{width:2.6rem}
.orders td{white-space:normal;overflow-wrap:anywhere}
.panels{display:grid;gap:1rem;
 grid-template-columns:repeat(auto-fit,minmax(min(24rem,100%),1fr))}
.panels figure{margin:0;max-width:30rem}
svg{display:block;width:100%;height:auto}
svg text{font-family:system-ui,sans-serif!important}
details{border:1px solid var(--grid);border-radius:.5rem;padding:0 1rem;
 margin:.8rem 0}
summary{cursor:pointer;font-weight:600;padding:.7rem 0}
blockquote{margin:.5rem 0;padding:.1rem 0 .1rem .9rem;white-space:pre-wrap;
 border-left:3px solid var(--grid);overflow-wrap:anywhere}
pre{overflow-x:auto;padding:.7rem .9rem;border:1px solid var(--grid);
 border-radius:.5rem;font-size:.86rem}
.tokens{font:.86rem/2.1 ui-monospace,monospace;overflow-wrap:anywhere}
.tokens span,.legend span{padding:.15rem .2rem;border-radius:.2rem;
 white-space:pre-wrap;box-decoration-break:clone;
 -webkit-box-decoration-break:clone}
.tokens .answer{box-shadow:0 .18rem 0 var(--ink)}
.tokens i{border-left:2px solid var(--ink);margin:0 .4rem;
 padding:.2rem 0}
.legend{display:flex;flex-wrap:wrap;gap:.3rem;align-items:center;
 font-size:.84rem;color:var(--muted);margin:.6rem 0 1rem}
'''


def render(content: Mapping[str, Any], headline: Sequence[str],
           panels: Mapping[str, Sequence[panels_lib.Panel]],
           published: Sequence[tables.Table]) -> str:
  """The page as text.

  Args:
    content: of the report.
    headline: sentences for its top.
    panels: figures by section.
    published: tables of published figures; empty for none.
  """
  sections = {
      'Results': panels_html(panels['Results']) + ''.join(map(table_html, (
          tables.accuracy(content), tables.differences(content),
          tables.stages(content), tables.validity(content),
          tables.reasoning(content), tables.unconditional(content)))),
      'Frontier': panels_html(panels['Frontier']) + table_html(
          tables.frontier(content)),
      'Steps': panels_html(panels['Steps']),
      'Published figures': ''.join(map(table_html, published)),
      'Training curves': panels_html(panels['Training curves']),
      'Worked examples': _examples(content.get('examples') or ()),
      'Data and model': ''.join(map(table_html, (
          tables.dataset(content), tables.floors(content),
          tables.facts_table('Model', content.get('model') or {})))),
      'Timing and environment': (
          table_html(tables.timing(content)) + table_html(tables.facts_table(
              'Environment', content['environment']))),
      'Command': f'<pre><code>{_text(content["command"])}</code></pre>',
  }
  return document(content['title'], headline, sections)


def document(title: str, headline: Sequence[str],
             sections: Mapping[str, str]) -> str:
  """A page of sections, HTML by name; empty ones are left out."""
  sections = {name: body for name, body in sections.items() if body}
  links = ''.join(f'<a href="#{_anchor(name)}">{name}</a>'
                  for name in sections)
  body = ''.join(f'<section id="{_anchor(name)}"><h2>{name}</h2>{section}'
                 f'</section>\n' for name, section in sections.items())
  points = ''.join(f'<li>{_text(line)}</li>' for line in headline)
  title = _text(title)
  return (
      '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
      '<meta name="viewport" content="width=device-width,initial-scale=1">'
      '<meta name="color-scheme" content="light dark">'
      f'<title>{title}</title><style>{_colours()}{_CSS}</style></head>\n'
      f'<body><h1>{title}</h1><ul>{points}</ul><nav>{links}</nav>\n{body}'
      '</body></html>\n')


def _text(value: str) -> str:
  return html.escape(str(value))


def _anchor(name: str) -> str:
  return name.lower().replace(' ', '-')


def _colours() -> str:
  """CSS variables of both colour schemes, and the ramp of commit steps."""
  light = ''.join(f'{name}:{colour};'
                  for colour, (name, _) in panels_lib.VARIABLES.items())
  dark = ''.join(f'{name}:{colour};'
                 for name, colour in panels_lib.VARIABLES.values())
  steps = ''.join(
      f'.s{i}{{background:{colour};color:{ink}}}'
      for i, (colour, ink) in enumerate(_RAMP))
  return (f':root{{color-scheme:light dark;{light}}}'
          f'@media(prefers-color-scheme:dark){{:root{{{dark}}}}}{steps}')


def table_html(table: tables.Table, css: str = '') -> str:
  """A table in a box that scrolls; nothing where it has no rows."""
  if not table.rows:
    return ''
  kinds = [' class="text"' if i < table.text_columns else ''
           for i in range(len(table.columns))]
  head = ''
  if any(table.columns):
    head = '<thead><tr>' + ''.join(
        f'<th{kind} scope="col">{_text(column)}</th>'
        for kind, column in zip(kinds, table.columns)) + '</tr></thead>'
  else:
    css = 'facts'
  body = ''.join('<tr>' + ''.join(
      f'<td{kind}>{_cell(cell)}</td>' for kind, cell in zip(kinds, row))
                 + '</tr>' for row in table.rows)
  note = f'<p class="note">{_text(table.note)}</p>' if table.note else ''
  return (f'<h3>{_text(table.title)}</h3><div class="box {css}" tabindex="0">'
          f'<table>{head}<tbody>{body}</tbody></table></div>{note}\n')


def _cell(cell: tables.Cell) -> str:
  text = f'<bdi>{_text(cell.text)}</bdi>'
  if cell.strong:
    text = f'<strong>{text}</strong>'
  return text + (f'<small>{_text(cell.small)}</small>' if cell.small else '')


def panels_html(panels: Sequence[panels_lib.Panel]) -> str:
  if not panels:
    return ''
  return '<div class="panels">' + ''.join(
      f'<figure aria-label="{_text(panel.title)}">{panel.svg}</figure>'
      for panel in panels) + '</div>\n'


def _examples(examples: Sequence[Mapping[str, Any]]) -> str:
  return ''.join(_example(i, example) for i, example in enumerate(examples))


def _example(index: int, example: Mapping[str, Any]) -> str:
  history = ''
  for item in example['history']:
    title, small = examples_lib.describe(item)
    history += (f'<li><bdi>{_text(title)}</bdi> '
                f'<small>{_text(small)}</small></li>')
  is_open = ' open' if index == 0 else ''
  trace = examples_lib.words(example)
  if trace:
    trace = f'<h3>Trace</h3><blockquote>{_text(trace)}</blockquote>'
  return (
      f'<details{is_open}><summary>'
      f'{_text(examples_lib.heading(index, example))}</summary>'
      f'<p>{_text(examples_lib.verdict(example))}.</p>'
      f'<h3>History, oldest first</h3><ol>{history}</ol>'
      f'{table_html(examples_lib.orders(example), "orders")}'
      f'{trace}<h3>Response</h3>{_tokens(example)}</details>\n')


def _tokens(example: Mapping[str, Any]) -> str:
  """The response's tokens, coloured by commit step, and a legend."""
  steps = examples_lib.commit_steps(
      [token['call'] for token in example['tokens']], example['block_size'])
  last = len(_RAMP) - 1
  spans = []
  for i, (token, step) in enumerate(zip(example['tokens'], steps)):
    block, place = divmod(i, example['block_size'])
    if block and not place and example['block_size'] > 1:
      spans.append('<i></i><wbr>')
    answer = ' answer' if token['is_answer'] else ''
    text = token['text'].replace('\n', '↵') or '·'
    spans.append(
        f'<span class="s{min(step, last)}{answer}" '
        f'title="block {block + 1}, step {step + 1}">{_text(text)}</span>'
        '<wbr>')
  shown = range(min(max(steps, default=0), last) + 1)
  swatches = ''.join(
      f'<span class="s{i}">{i + 1}{"+" if i == last else ""}</span>'
      for i in shown)
  return (
      f'<p class="tokens">{"".join(spans)}</p><div class="legend">step within '
      f'the block: {swatches} · bars part blocks of {example["block_size"]} '
      'tokens · underlined: the answer</div>')
