"""Words of somebody who was told what comes next.

    text -> titles, SIDs and candidates by one name each -> `LEAK`

A teacher may be told the target (targeted sampling), or guess that there is
one. Its reasoning is of use only if it doesn't show: it may say what is likely,
not what was bought, what is correct or what it was asked to do. Wordings have
no end, so the filter leans to refusing: a sentence too many costs an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
import re

from dgr2_jax.data import tokens

NUMBERED = r'\bcandidate\s*(?:(?:#|no\.?|number)\s*)?([0-9]+)'
_CANDIDATE = re.compile(NUMBERED)
# A candidate that its SID names once more.
_TWICE = re.compile(r'(candidate [0-9]+) (?:is )?,? ?\1\b')
_ARTICLE = re.compile(r'\b(?:the|an?)\b', re.IGNORECASE)
_MARKS = str.maketrans(
    dict.fromkeys('*_`"()[]\u201c\u201d', ' ')
    | dict.fromkeys('\u200b\u200c\u200d\u2060\ufeff', None)
    | dict.fromkeys('\u2010\u2011\u2012\u2013\u2014\u2212', '-')
    | {'\u2019': "'"})
LONGEST = 20_000  # characters; no reasoning needs so many

_SHOPPER = (r'(?:shopper|customer|consumer|user|buyer|purchaser|person|they|he|'
            r'she)')
_BOUGHT = r'(?:bought|purchased|ordered|acquired)'
_CHOSE = (r'(?:chose|picked|selected|took|got|wanted|opted for|settled on|'
          r'went for|went with)')
_CHOSEN = rf'(?:{_BOUGHT}|chosen|picked|selected)'
_ITEM = r'(?:item|product|candidate|purchase|choice|pick|selection|order|one)'
_REALLY = (r'(?:(?:indeed|in fact|actually|really|then|subsequently|later|'
           r'ultimately|eventually|finally|also|what was|the one|the item|'
           r'the product|the candidate|that was|that is) ){0,6}')
_C = r'candidate [0-9]+,?'
# What is targeted on a body or a market, not what is to be guessed.
_AREA = (r'(?: [a-z-]+)? (?:areas?|zones?|spots?|skin|hair|ages?|audiences?|'
         r'groups?|markets?|users?|customers?|consumers?|demographics?|'
         r'concerns?|problems?)\b')

LEAK = re.compile('|'.join((
    # The target, the truth, the answer.
    rf'\b(?:the|this|that|our|my|your|a|as|is|was|matches|match|matching)'
    rf' target\b(?!{_AREA})',
    rf'\btarget (?:{_ITEM}|is|was)\b', r'\btarget ?[:=]',
    rf'\b{_C} ?:? target\b(?!{_AREA})',
    r'\bground[ -]?truth\b',
    rf'\b(?:correct|true|gold|real|expected|desired|intended|required)'
    rf' (?:answer|target|label|outcome|solution|prediction|{_ITEM}|'
    rf'option|next)\b',
    rf'\b(?:known|given|provided) (?:answer|target|label|outcome|solution|'
    rf'choice|next {_ITEM})\b',
    r'\bright (?:answer|(?:choice|option) (?:is|was)|candidate|target|solution|'
    r'prediction|next)\b',
    r'\bthe answer\b(?! to )',
    r'\b(?:candidate [0-9]+|it|this|that) is correct\b',
    # What was bought in the end.
    rf'\bactual(?:ly)? (?:next|choice|purchase|{_CHOSEN}|chose)\b',
    rf'\b(?:was|is|were|been|got|being) (?:indeed|in fact) {_CHOSEN}\b',
    rf'\b(?:was|were|got|been) {_REALLY}{_CHOSEN} next\b',
    rf'\b{_C} (?:was|got|has been|had been|is) {_REALLY}{_CHOSEN}'
    rf'(?= (?:next|by (?:the|this) {_SHOPPER}|in the end|after(?:wards)?)\b'
    rf'| ?[.,;:!]| ?$)',
    rf'\b{_C} (?:was|is) (?:the |their |her |his |this {_SHOPPER}\'s |'
    rf'what |that )?(?:the {_SHOPPER}\'s )?next (?:{_ITEM}|bought)\b',
    rf'\b{_C} (?:was|is) {_REALLY}(?:what |which |that )?(?:the |this )?'
    rf'{_SHOPPER} {_REALLY}(?:{_BOUGHT}|{_CHOSE})\b',
    rf'\b{_SHOPPER} {_REALLY}(?:{_BOUGHT}|{_CHOSE}) candidate\b',
    rf'\b{_BOUGHT} (?:was )?candidate [0-9]',
    rf'\b{_BOUGHT} next(?: was| is| were|:)',
    r"\b(?:next|following) (?:item|product|purchase|choice|pick|order|buy)"
    r"(?: that)?(?: the shopper)?(?: made)?,? "
    r"(?:was|turned out|proved|ended|has been|had been)\b",
    r'\bnext (?:item|product|purchase|choice|pick|order|buy)'
    r' ?(?:[,:=]|is|being)? candidate [0-9]',
    r'\b(?:went on|goes on|go on|going on|proceed(?:ed|s)?) to (?:buy|purchase|'
    r'order|choose|pick|select|get|acquire)\b',
    r'\b(?:ended|ends|wound|winds) up (?:with|buying|purchasing|ordering|'
    r'choosing|picking|selecting|getting|acquiring)\b',
    rf'\b(?:eventually|ultimately) (?:{_BOUGHT}|{_CHOSE})\b',
    rf'\b(?:subsequent|future|eventual|later|known|final) {_ITEM} (?:is|was|of)'
    rf' {_C}', r'\bheld[- ]out\b', r'\blabel (?:is|was)\b',
    rf'\b{_C} (?:is|was) what (?:came|comes|follow(?:ed|s))\b',
    rf'\b{_SHOPPER} {_REALLY}{_BOUGHT} (?:it|this|that)(?= next| ?[.,;!]| ?$)',
    rf'\b{_SHOPPER} did {_REALLY}(?:buy|purchase|order|choose|pick) candidate'
    rf'\b',
    r'\b(?:know|knowing|known|knew) the (?:outcome|result)\b',
    r'\bhindsight\b', r'\bas it turn(?:s|ed) out\b',
    r'\b(?:was|is|been) (?:revealed|disclosed)\b',
    # What the teacher knows and was asked to do.
    r'\b(?:was|were|am|are|been|being) (?:told|informed|instructed|asked|'
    r'given the (?:answer|target))\b',
    r'\b(?:as|like) (?:[a-z]+ )?(?:instructed|told|requested|directed|ordered|'
    r'demanded|stipulated)\b',
    r'\b(?:the|this|your|my) (?:prompt|instructions?)\b',
    r'\b(?:put|place|rank) (?:it|this|that|this one|that one) first\b',
    r"\b(?:i|you|we)(?: already| have|'ve)* (?:knew|known)\b",
    r"\b(?:i|you|we) already know\b",
    r"\b(?:i|you|we) know (?:that )?(?:it|candidate)\b",
    r"\bwe know what (?:the |this )?[a-z]+ (?:bought|purchased|chose)\b",
    rf'\b(?:must|need to|have to|had to) justify\b',
    r'\breason(?:ing|ed)? (?:your|my|our|a|the) way\b',
    r'\bpurchases alone\b',
    r'\b(?:your|my|our) words\b')))


def strip_titles(text: str, titles: Sequence[str]) -> str:
  """Puts a mark in the place of each title, which may say anything.

  Only of titles of two words or more, articles aside: one word says nothing of
  the kind that is looked for, and as a title it would hide the word elsewhere.

  Args:
    text: any.
    titles: of what the text speaks of.

  Returns:
    The text, with single spaces.
  """
  text = ' '.join(text.split())
  for title in sorted({' '.join(t.split()) for t in titles}, key=len,
                      reverse=True):
    if len(re.findall(r'\w+', _ARTICLE.sub('', title))) >= 2:
      text = re.sub(rf'(?<!\w){re.escape(title)}(?!\w)', '\u2026', text)
  return text


def told(text: str, titles: Sequence[str], candidates: Sequence[str]) -> bool:
  """Whether a text speaks as somebody who was told what comes next.

  One of more than `LONGEST` characters counts as such.

  Args:
    text: the reasoning.
    titles: of what it speaks of.
    candidates: SIDs, as text; a candidate may be called by either.
  """
  if len(text) > LONGEST:
    return True
  names = {sid: f' candidate {number} '
           for number, sid in enumerate(candidates, 1)}
  text = tokens.SEMANTIC_ID.sub(
      lambda sid: names.get(sid[0], ' \u2026 '), strip_titles(text, titles))
  text = _CANDIDATE.sub(r'candidate \1', text.translate(_MARKS).lower())
  text = re.sub(r' (?=[.,;:!?])', '', ' '.join(text.split()))
  return LEAK.search(_TWICE.sub(r'\1', text)) is not None
